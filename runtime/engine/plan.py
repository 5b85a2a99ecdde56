"""The values that a step is made of: its plan, each sequence's share, and what came of it."""

from dataclasses import dataclass, field

from ropeway.compiler.config import Bucket
from ropeway.runtime.engine.request import Choice, FinishReason


@dataclass(slots=True)
class Chunk:
    """One sequence's share of a step: tokens start..start + count.

    Prompt rows `scored[0]..scored[1]` (positions) are wanted for prompt logprobs; `samples` is how
    many tokens are drawn from the last row: one, or n before a fork.
    """

    seq: Choice
    start: int
    count: int
    scored: tuple[int, int]
    samples: int


@dataclass(slots=True)
class StepPlan:
    """A decided step. Copies run first, in order; their sources stay held until commit."""

    number: int
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    tokens: int = 0
    rows: int = 0
    scored: int = 0  # of the rows
    samples: int = 0
    open: bool = True  # neither committed nor abandoned
    bucket: Bucket = field(init=False)  # set once the plan is complete


@dataclass(slots=True)
class Progress:
    """What a committed step did for one sequence; `draw` is the index of its draw, -1 without.

    A draw that failed (token below 0) ends the sequence with an error.
    """

    seq: Choice
    token: int | None
    draw: int = -1
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # of those, found

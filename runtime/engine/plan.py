"""The values that a step is made of: its plan, each sequence's share, and what came of it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import RunError
from ropeway.runtime.engine.messages import FinishReason
from ropeway.runtime.engine.request import Choice


class Chunk(msgspec.Struct):
    """One sequence's share of a step: tokens start..start + count.

    Prompt rows `scored[0]..scored[1]` (positions) are wanted for prompt logprobs; `samples` is how
    many tokens are drawn from the last row: one, or n before a fork. `feed`: the one token's id is
    this draw of the step before, which isn't committed yet; -1: the ids are known.
    """

    seq: Choice
    start: int
    count: int
    scored: tuple[int, int]
    samples: int
    feed: int = -1


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
    fed: int = 0  # of the tokens
    bucket: Bucket = field(init=False)  # set once the plan is complete


class Progress(msgspec.Struct):
    """What a committed step did for one sequence; `draw` is the index of its draw, -1 without.

    A draw that failed (token below 0) ends the sequence with an error.
    """

    seq: Choice
    token: int | None
    draw: int = -1
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


class SchedulerCounters(msgspec.Struct):
    """Totals since the start."""

    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # of those, found


def check_running(running: Sequence[Choice], flying: Iterable[StepPlan]) -> None:
    """Verify the order of the running sequences, and that they know which steps they are in.

    Raises RunError.
    """
    keys = [seq.key for seq in running]
    if keys != sorted(set(keys)):
        raise RunError("scheduler: a sequence runs twice, or out of order")
    chunks = Counter(chunk.seq for plan in flying for chunk in plan.chunks)
    for seq in running:
        ahead = seq.num_planned - seq.num_computed
        if chunks.pop(seq, 0) != seq.in_flight or (ahead > 0) != (seq.in_flight > 0):
            raise RunError(f"scheduler: {seq.key} isn't in the {seq.in_flight} steps it counts")
    if chunks:
        raise RunError("scheduler: a step in flight holds a sequence that doesn't run")

"""What the engine knows of a request, and the state of each of its sequences (choices).

Contract: a request is validated before it gets here and never changes; all mutable state is in its
sequences, which only the scheduler writes. A sequence's tokens are its prompt followed by what was
sampled, whatever happened to its KV: preemption drops blocks, never tokens.
"""

import enum

import msgspec
import numpy as np
from numpy.typing import NDArray

from ropeway.runtime.engine.admission import check_fits
from ropeway.runtime.engine.prefix import PrefixEntry

Key = tuple[int, int, int]


class State(enum.Enum):
    """Where a sequence is. WAITING covers both never started and preempted."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request(msgspec.Struct, frozen=True):
    """One prompt and how to continue it, as far as scheduling is concerned.

    `total_tokens` bounds prompt and output together; `stop_ids` maps each token id that ends a
    choice to whether the id is reported as stop_reason.
    """

    request_id: str
    prompt: NDArray[np.int32]
    total_tokens: int
    stop_ids: dict[int, bool] = msgspec.field(default_factory=dict)
    choices: int = 1
    priority: int = 0  # lower runs first
    salt: str = ""
    wants_prompt_logprobs: bool = False
    arrival: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt)

    def check_fits(self, max_model_len: int, capacity_tokens: int) -> None:
        """Raises RequestError unless program and KV cache can hold it alone."""
        check_fits(self.prompt_tokens, self.total_tokens, max_model_len, capacity_tokens)


class Choice:
    """One choice of a request: its tokens, how many of them have KV, and the blocks it holds."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "choice",
        "draws",
        "ended",
        "entries",
        "feed",
        "forks",
        "in_flight",
        "key",
        "last_step",
        "last_token",
        "num_computed",
        "num_pending",
        "num_planned",
        "num_tokens",
        "preemptions",
        "priority",
        "published",
        "request",
        "rows_done",
        "shared",
        "slot",
        "state",
        "tokens",
    )

    def __init__(self, request: Request, choice: int = 0) -> None:
        self.request = request
        self.choice = choice
        self.priority = request.priority
        self.key: Key = (request.priority, request.arrival, choice)
        self.state = State.WAITING
        self.tokens = request.prompt  # replaced by a buffer with room for the output once it runs
        self.num_tokens = request.prompt_tokens
        self.last_token = int(request.prompt[-1])
        self.num_computed = 0
        self.rows_done = 0  # prompt rows whose logprobs have been recorded
        self.cached_tokens = -1  # prompt tokens found in the prefix cache when it first ran
        self.slot = -1
        self.blocks: list[int] = []
        self.entries: list[PrefixEntry] = []
        self.published = 0  # leading blocks that needn't be offered to the prefix cache any more
        self.shared = False  # whether another sequence may hold the block it writes next
        self.forks = request.choices - 1 if choice == 0 else 0  # choices still to be forked
        self.draws = request.total_tokens > request.prompt_tokens  # False: only scored
        # What steps that were planned and aren't committed yet will have done:
        self.in_flight = 0  # in how many of them it is
        self.num_planned = 0  # its num_computed after them
        self.num_pending = 0  # tokens that they draw for it; each feeds the next step
        self.last_step = 0  # the number of the last one
        self.feed = -1  # which of that step's draws is its own
        self.ended = False  # nothing is owed any more, but a step in flight writes its blocks
        self.preemptions = 0

    @property
    def output_tokens(self) -> int:
        """How many tokens were sampled so far."""
        return self.num_tokens - self.request.prompt_tokens

    @property
    def num_coming(self) -> int:
        """Length once the steps in flight are committed, if it goes on."""
        return self.num_tokens + self.num_pending

    @property
    def open(self) -> bool:
        """Whether its end is still owed."""
        return self.state is not State.FINISHED and not self.ended

    def reserve(self) -> None:
        """Make room for the output; cheap to call again."""
        if len(self.tokens) < self.request.total_tokens:
            tokens = np.empty(self.request.total_tokens, np.int32)
            tokens[: self.num_tokens] = self.tokens[: self.num_tokens]
            self.tokens = tokens

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.tokens[self.num_tokens] = token
        self.last_token = token
        self.num_tokens += 1

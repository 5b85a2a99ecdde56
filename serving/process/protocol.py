"""What the HTTP process and the engine process say to each other: msgspec structs over ZMQ.

Contract: token ids only, no text. Every request that was added gets updates until each of its
choices had one with a finish reason or was named in a FinishChoice, or one Rejected and nothing
else; nothing follows after that.
"""

import msgspec

from ropeway.runtime.engine.messages import EngineStats, GenerationRequest, Update
from ropeway.runtime.engine_options import EngineOptions
from ropeway.runtime.text.assets import TokenizerAssets


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine process is to start: one line of JSON on its stdin, which stays open; its end
    means that the parent died."""

    artifact: str
    options: EngineOptions
    parent: int  # process id
    inbox: str  # endpoint that the engine makes
    outbox: str  # endpoint that the parent made
    stream_interval: float | None = None


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Run a request. With `confirm` the engine answers Accepted or Rejected before any news."""

    request: GenerationRequest
    confirm: bool = False


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request: its open choices finish with "abort"."""

    request_id: str


class FinishChoice(msgspec.Struct, frozen=True, tag="finish"):
    """A stop string was found: the choice ends and nothing more is heard of it."""

    request_id: str
    choice: int


class AskStats(msgspec.Struct, frozen=True, tag="ask"):
    """Wants one Stats."""


class Quit(msgspec.Struct, frozen=True, tag="quit"):
    """End every request and then the process."""


ToEngine = Add | Abort | FinishChoice | AskStats | Quit


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded engine is; said once. Times in seconds, memory in bytes."""

    model: str
    target: str  # "cpu", and why it was chosen
    device: str  # one line: instruction set, threads
    vocab_size: int
    max_model_len: int
    capacity_tokens: int  # of the KV cache
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_blocks: int
    kv_bytes: int
    buckets: tuple[str, ...]
    eos_ids: tuple[int, ...]
    load_seconds: float
    pid: int


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The artifact was found; its tokenizer can be made while the rest loads."""

    tokenizer: TokenizerAssets | None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine can serve."""

    info: EngineInfo


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """A request that asked for confirmation is queued."""

    request_id: str


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """A request that can't be served: `field` names what is wrong with it."""

    request_id: str
    field: str
    message: str


class News(msgspec.Struct, frozen=True, tag="news"):
    """Updates of one step, or of several when they come fast."""

    updates: list[Update]


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """The engine's totals and state."""

    stats: EngineStats


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Steps were run, though there was no news for a second: a long prompt, say."""

    steps: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine couldn't be loaded, or is about to end: one line that says why.

    `input` is whether what it was given is at fault, rather than the run.
    """

    message: str
    input: bool = False


FromEngine = Opened | Ready | Accepted | Rejected | News | Stats | Progress | Failed

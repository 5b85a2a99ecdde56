"""What goes into the engine core and what comes out: values, fit to cross a process boundary.

Contract: every accepted request gets updates until each of its choices had one with a finish
reason; nothing follows after that.
"""

from typing import Literal

import msgspec

from ropeway.runtime.sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, as token ids, and how to continue it.

    `priority`: lower runs first. `salt` keeps prefix-cache entries apart: only requests with the
    same salt share blocks.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    salt: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """A token's logprob and rank under the raw model distribution, and its best alternatives,
    most likely first: the i-th has rank i + 1."""

    token: int
    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class Update(msgspec.Struct):
    """News of one choice: a token, its end, or both.

    `prompt_logprobs` comes once, with the request's first update: one entry for each prompt token
    but the first. `stop_reason` is a stop token id, or what went wrong when finish_reason is error.
    """

    request_id: str
    choice: int
    token: int | None
    cached_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the engine started, and its state now. Times in seconds, caches in blocks.

    `native_seconds` were spent waiting for the device, `host_seconds` in the rest of each step;
    with two steps in flight the latter pass while the device runs.
    `prefix_queries` and `prefix_hits` count prompt tokens that were looked up and found.
    """

    steps: int
    native_seconds: float
    host_seconds: float
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    blocks_free: int
    blocks_cached: int
    block_size: int

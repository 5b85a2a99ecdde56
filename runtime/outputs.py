"""What a generation gives back; names as vLLM users know them. Plain values, no behaviour."""

import msgspec


class Logprob(msgspec.Struct, frozen=True):
    """A token's logprob under the raw model distribution and its rank there (1: most likely).

    `decoded_token` is its text alone; "" without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str = ""


Logprobs = dict[int, Logprob]


class CompletionOutput(msgspec.Struct, frozen=True):
    """One choice. `token_ids` are all that were drawn, an end token too; `text` ends before it.

    `logprobs` has, for each token, the drawn one first and then the alternatives asked for.
    `finish_reason` is "stop" (`stop_reason`: the stop string or stop token id; None for an
    end-of-sequence token), "length" or "abort".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None
    finish_reason: str
    stop_reason: int | str | None


class RequestOutput(msgspec.Struct, frozen=True):
    """A finished request. `prompt` is the text it came as, None when it came as token ids.

    `prompt_logprobs` has one entry per prompt token, None for the first. `num_cached_tokens` of
    the prompt were found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int


class CompletionDelta(msgspec.Struct, frozen=True):
    """News of one choice in a stream: the texts of a choice's deltas, joined, are its full text.

    `finish_reason` and `stop_reason` come with its last delta.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

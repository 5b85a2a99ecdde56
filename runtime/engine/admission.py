"""What a request must satisfy before it may be queued: pure checks, without the engine.

Contract: a process that only knows an engine's `Capacity` refuses exactly what the engine itself
would refuse, in the same words. Nothing here imports numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from ropeway.compiler.errors import RequestError
from ropeway.runtime.engine.messages import GenerationRequest
from ropeway.runtime.sampling.params import SamplingParams

_PRIORITIES = 2**63  # what messages between processes can hold


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can hold. Lengths in tokens; `capacity_tokens` is the whole KV cache."""

    vocab_size: int
    max_model_len: int
    capacity_tokens: int
    eos_ids: tuple[int, ...] = ()


def check_request(request: GenerationRequest, capacity: Capacity) -> int:
    """The most tokens, prompt and output together, that the request's choices can have.

    Raises RequestError, naming the field, when it could never be served.
    """
    _check_form(request)
    _check_prompt(request.prompt, capacity.vocab_size)
    prompt_tokens = len(request.prompt)
    total = _total_tokens(prompt_tokens, request.params.max_tokens, capacity)
    request.params.check_vocabulary(capacity.vocab_size, capacity.eos_ids)
    check_fits(prompt_tokens, total, capacity.max_model_len, capacity.capacity_tokens)
    return total


def check_fits(
    prompt_tokens: int, total_tokens: int, max_model_len: int, capacity_tokens: int
) -> None:
    """Raises RequestError unless program and KV cache can hold such a request alone."""
    if prompt_tokens == 0:
        raise RequestError("prompt", "it has no tokens; give at least one")
    if not prompt_tokens <= total_tokens <= max_model_len:
        raise RequestError(
            "prompt",
            f"{prompt_tokens} tokens and the output come to {total_tokens}, "
            f"but the program holds {max_model_len}: shorten the prompt or max_tokens",
        )
    # The last sampled token is never computed, so it needs no room in the cache.
    needed = max(prompt_tokens, total_tokens - 1)
    if needed > capacity_tokens:
        raise RequestError(
            "max_tokens",
            f"prompt and output need {needed} tokens of KV cache, which holds only "
            f"{capacity_tokens}: lower max_tokens or raise kv_cache_memory",
        )


def check_params(params: Any) -> None:
    """Raises RequestError for what isn't a SamplingParams; these check themselves when made."""
    if not isinstance(params, SamplingParams):
        raise RequestError(
            "sampling_params", f"must be a SamplingParams, not {type(params).__name__}"
        )


def _check_form(request: GenerationRequest) -> None:
    """What the struct's annotations say, but nobody checks when it is made in this process."""
    check_params(request.params)
    priority: Any = request.priority
    salt: Any = request.salt
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError("priority", f"{priority!r} isn't a whole number")
    if not -_PRIORITIES <= priority < _PRIORITIES:
        raise RequestError("priority", "must fit 64 bits")
    if not isinstance(salt, str):
        raise RequestError("cache_salt", f"must be text, not {type(salt).__name__}")
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        raise RequestError("cache_salt", f"must be Unicode text: {error}") from error


def _check_prompt(prompt: Sequence[int], vocab_size: int) -> None:
    if len(prompt) == 0:
        raise RequestError("prompt", "it has no tokens; give at least one")
    if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < vocab_size:
        return
    given: Sequence[Any] = prompt
    for index, token in enumerate(given):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError("prompt", f"{token!r} at {index} isn't a whole number")
        if not 0 <= int(token) < vocab_size:
            raise RequestError(
                "prompt",
                f"token id {token} at {index} is outside the vocabulary, 0 to {vocab_size - 1}",
            )


def _total_tokens(prompt_tokens: int, max_tokens: int | None, capacity: Capacity) -> int:
    limit = capacity.max_model_len
    if prompt_tokens >= limit:
        raise RequestError(
            "prompt",
            f"{prompt_tokens} tokens leave no room for an answer: the program holds {limit} "
            f"tokens, prompt and output together; shorten the prompt",
        )
    if max_tokens is not None:
        return min(limit, prompt_tokens + max_tokens)
    # As much as fits: the last token is never computed, so it needs no room in the cache.
    return max(min(limit, capacity.capacity_tokens + 1), prompt_tokens + 1)

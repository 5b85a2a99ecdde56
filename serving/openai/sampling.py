"""From a request's fields to SamplingParams, with OpenAI's defaults."""

from typing import Any

from ropeway.runtime.sampling.params import MAX_CHOICES, SamplingParams
from ropeway.serving.errors import ApiError
from ropeway.serving.openai.fields import GenerationFields

DEFAULT_MAX_TOKENS = 16  # of a completion
MAX_BEST_OF = 128

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "allowed_token_ids",
)


def sampling_params(request: GenerationFields, **own: Any) -> SamplingParams:
    """The parameters of `request`; `own` are those that an endpoint derives itself, such as n.

    Raises RequestError with the name of a field that has a bad value.
    """
    given = {name: getattr(request, name) for name in _SAME_NAME}
    values = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{**values, **own})


def check_modes(request: GenerationFields) -> None:
    """Raises ApiError 400 for fields that make no sense together, streamed or whole."""
    if not request.stream:
        if request.stream_options is not None:
            raise ApiError(400, "stream_options: only with stream: true", param="stream_options")
        return
    for name, why, given in (
        ("best_of", "the best are known at the end", (request.best_of or 0) > (request.n or 1)),
        ("use_beam_search", "the best beams are known at the end", request.use_beam_search),
        ("prompt_logprobs", "use echo with logprobs", request.prompt_logprobs is not None),
    ):
        if given:
            raise ApiError(400, f"{name}: not with stream: {why}", param=name)


def draws(request: GenerationFields) -> int:
    """How many choices are generated, of which the best n are answered.

    Raises ApiError 400 for a best_of below n or above the limit.
    """
    n = request.n or 1
    best_of = request.best_of or n
    if best_of < n:
        raise ApiError(400, f"best_of: {best_of} is fewer than n, {n}", param="best_of")
    if best_of > n and best_of > MAX_BEST_OF:
        raise ApiError(400, f"best_of: at most {MAX_BEST_OF}", param="best_of")
    return best_of


def check_choices(request: GenerationFields, prompts: int) -> None:
    """Raises ApiError 400 for more choices, of all prompts together, than one request may have."""
    if draws(request) * prompts > MAX_CHOICES:
        field = "best_of" if (request.best_of or 0) > (request.n or 1) else "n"
        why = f"{prompts} prompts come to more than {MAX_CHOICES} choices"
        raise ApiError(400, f"{field}: {why}", param=field)


def room_for_answer(
    prompt_tokens: int, wanted: int | None, max_model_len: int, *, prompt: str, max_tokens: str
) -> int:
    """max_tokens of a prompt: `wanted`, or what the context has left (None).

    `prompt` and `max_tokens` are the caller's names of the fields. Raises ApiError 400 when prompt
    and answer don't fit; an answer has at least one token.
    """
    if prompt_tokens == 0:
        raise ApiError(400, f"{prompt}: it has no tokens; give at least one", param=prompt)
    if prompt_tokens + max(wanted or 0, 1) <= max_model_len:
        return max_model_len - prompt_tokens if wanted is None else wanted
    blamed = prompt if prompt_tokens >= max_model_len else max_tokens
    asked = f"{prompt_tokens} tokens" + (f" and {wanted} of answer" if wanted else "")
    raise ApiError(
        400,
        # Libraries tell this error from others by its first words.
        f"{blamed}: this model's maximum context length is {max_model_len} tokens, prompt and "
        f"answer together, but {asked} were asked for: shorten the prompt or lower {max_tokens}",
        param=blamed,
        code="context_length_exceeded",
    )

"""Token counts of an answer, as OpenAI's usage object."""

import msgspec


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens` of the prompts were found in the prefix cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """`reasoning_tokens`: tokens that the text of the model's thinking makes."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Every prompt counts once, however many choices it has; every choice that was drawn counts,
    those too that best_of dropped."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_of(prompt: int, completion: int, cached: int, reasoning: int = 0) -> Usage:
    """The usage object of these counts."""
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached),
        completion_tokens_details=CompletionTokensDetails(reasoning),
    )

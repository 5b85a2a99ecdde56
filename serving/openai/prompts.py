"""A completion request's prompts: texts, token ids or lists of either, to token ids."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ropeway.runtime.text.tokenizer import Tokenizer
from ropeway.serving.errors import ApiError
from ropeway.serving.http.context import ServerContext
from ropeway.serving.openai.fields import CompletionRequest

MAX_PROMPTS = 1024  # of one request


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what the caller wrote, None where it was token ids or was truncated."""

    ids: tuple[int, ...]
    text: str | None = None

    def shown(self, tokenizer: Tokenizer | None, skip_special_tokens: bool) -> str:
        """The text that echo puts before the answer."""
        if self.text is not None:
            return self.text
        return tokenizer.decode(self.ids, skip_special_tokens) if tokenizer else ""

    def truncated(self, count: int) -> "Prompt":
        """Only the last `count` tokens."""
        return self if count >= len(self.ids) else Prompt(self.ids[len(self.ids) - count :])


async def read_prompts(request: CompletionRequest, context: ServerContext) -> list[Prompt]:
    """The prompts of `request`, encoded in a thread.

    Raises ApiError 400 for an empty one, a list that mixes kinds, or text without a tokenizer.
    """
    given = _listed(request.prompt)
    texts = [one for one in given if isinstance(one, str)]
    encoded: Iterator[Prompt] = iter(())
    if texts:
        tokenizer = needed_tokenizer(context, "prompt")
        special = request.add_special_tokens is not False

        def encode() -> list[Prompt]:
            return [
                Prompt(tuple(tokenizer.encode(text, add_special_tokens=special)), text)
                for text in texts
            ]

        encoded = iter(await context.client.in_thread(encode))
    return [next(encoded) if isinstance(one, str) else Prompt(tuple(one)) for one in given]


def needed_tokenizer(context: ServerContext, field: str) -> Tokenizer:
    """The server's tokenizer. Raises ApiError 400 when its model has none."""
    if context.client.tokenizer is None:
        why = "this model has no tokenizer: give token ids to /v1/completions"
        raise ApiError(400, f"{field}: {why}", param=field)
    return context.client.tokenizer


def _listed(prompt: str | Sequence[Any]) -> list[str | list[int]]:
    """One entry for each prompt; none is empty."""
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif prompt and all(isinstance(one, int) for one in prompt):
        prompts = [list(prompt)]
    else:
        prompts = list(prompt)
    if not prompts:
        raise ApiError(400, "prompt: it is empty; give at least one token", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(400, f"prompt: at most {MAX_PROMPTS} prompts at once", param="prompt")
    for index, one in enumerate(prompts):
        path = f"prompt[{index}]" if len(prompts) > 1 else "prompt"
        if isinstance(one, int):
            raise ApiError(400, f"{path}: a token id between prompts: list the ids", param=path)
        if not one:
            raise ApiError(400, f"{path}: it is empty; give at least one token", param=path)
    return prompts

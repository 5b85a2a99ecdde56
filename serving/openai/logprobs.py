"""Logprobs in the two shapes of OpenAI's answers."""

from collections.abc import Callable, Sequence

import msgspec

from ropeway.runtime.outputs import Logprob, Logprobs
from ropeway.runtime.text.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON hasn't


class TextLogprobs(msgspec.Struct):
    """A completion's: four lists, an entry a token. `text_offset` counts characters of the choice's
    text, the echoed prompt included, before the token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct):
    """One alternative."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    """A token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """A chat choice's."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    """A prompt token or one of its alternatives, keyed by token id."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TextLogprobsWriter:
    """Makes a choice's TextLogprobs, piece by piece; offsets run on from piece to piece."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        count: int,
        *,
        skip_special_tokens: bool = True,
        as_token_ids: bool = False,
    ) -> None:
        """`prompt`: what the text follows. `count` alternatives a token."""
        self._push: Callable[[int], str] = lambda token: ""
        self._text: Callable[[int], str] = lambda token: ""
        if tokenizer is not None:
            self._push = tokenizer.detokenizer(prompt, skip_special_tokens).push
            self._text = tokenizer.token_text
        self._count = count
        self._as_ids = as_token_ids
        self._offset = 0

    def skip_to(self, offset: int) -> None:
        """What follows begins at this offset."""
        self._offset = offset

    def take(self, ids: Sequence[int], entries: Sequence[Logprobs | None]) -> TextLogprobs:
        """The entries of the next tokens; None is a token whose logprob isn't known."""
        made = TextLogprobs([], [], [], [])
        for token, entry in zip(ids, entries, strict=True):
            made.text_offset.append(self._offset)
            self._offset += len(self._push(token))
            if entry is None:
                made.tokens.append(self._name(token, self._text(token)))
                made.token_logprobs.append(None)
                made.top_logprobs.append(None)
                continue
            chosen = entry[token]
            made.tokens.append(self._name(token, chosen.decoded_token))
            made.token_logprobs.append(finite(chosen.logprob))
            top: dict[str, float] = {}
            for other, value in top_entries(entry, self._count, token):
                # Parts of characters may all look alike: the more likely one keeps the name.
                top.setdefault(self._name(other, value.decoded_token), finite(value.logprob))
            made.top_logprobs.append(top)
        return made

    def _name(self, token: int, text: str) -> str:
        return f"token_id:{token}" if self._as_ids else text


def chat_logprobs(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    entries: Sequence[Logprobs],
    count: int,
    as_token_ids: bool,
) -> list[TokenLogprob]:
    """The entries of some tokens of an answer, each with `count` alternatives."""

    def name(token: int, value: Logprob) -> str:
        return f"token_id:{token}" if as_token_ids else value.decoded_token

    def raw(token: int) -> list[int]:
        return list(tokenizer.token_bytes(token))

    return [
        TokenLogprob(
            name(token, entry[token]),
            finite(entry[token].logprob),
            raw(token),
            [
                TopLogprob(name(other, value), finite(value.logprob), raw(other))
                for other, value in top_entries(entry, count)
            ],
        )
        for token, entry in zip(ids, entries, strict=True)
    ]


def top_entries(
    entry: Logprobs, count: int, chosen: int | None = None
) -> list[tuple[int, Logprob]]:
    """The `count` most likely tokens of an entry, likeliest first, and `chosen` too."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)
    top = [item for item in ranked if item[1].rank <= count][:count]
    if chosen is not None and all(token != chosen for token, _ in top):
        top.append((chosen, entry[chosen]))
    return top


def prompt_logprobs(
    ids: Sequence[int], entries: Sequence[Logprobs | None], count: int
) -> PromptLogprobs:
    """The prompt's, an object by token id for each token but the first."""
    return [
        None
        if entry is None
        else {
            str(token): PromptLogprob(finite(value.logprob), value.rank, value.decoded_token)
            for token, value in top_entries(entry, count, chosen)
        }
        for chosen, entry in zip(ids, entries, strict=True)
    ]


def finite(logprob: float) -> float:
    """`logprob`, or the lowest that JSON can say."""
    return logprob if logprob > LOWEST else LOWEST

"""Incremental decoding: tokens in, text out, and the deltas together are the whole decode.

A delta holds complete characters only; what is left undecodable at the end comes out of `finish`
as U+FFFD. The prompt gives the context (a leading space is kept after visible text) and never
shows: of a prompt that ends inside a character, only that character can appear, once completed.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

_EACH = "ropeway-replace-each"
_REPLACEMENT = "\ufffd"
_PENDING_BYTES = 3  # the longest truncated UTF-8 character
_WINDOW_CONTEXT = 6
_WINDOW_HELD = 16


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH, _replace_each)


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text, in order."""

    def push(self, token: int) -> str:
        """The text that `token` completes, often all of its own; O(1) amortised."""
        ...

    def finish(self) -> str:
        """What is left; call once."""
        ...


class ByteDetokenizer:
    """Decodes by bytes: `piece` gives a token's bytes (none for a token that isn't shown).

    `strip` spaces are dropped from the start of the text when the prompt shows none. `each`: an
    undecodable byte gives one U+FFFD, not one a truncated character.
    """

    def __init__(
        self,
        piece: Callable[[int], bytes],
        prompt: Sequence[int] = (),
        *,
        strip: int = 0,
        each: bool = False,
    ) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")(_EACH if each else "replace")
        tail = b""
        for token in reversed(prompt):
            tail = piece(token) + tail
            if len(tail) >= _PENDING_BYTES:
                break
        self._decoder.decode(tail[-_PENDING_BYTES:])
        self._strip = 0 if tail else strip

    def push(self, token: int) -> str:
        """The characters that the token completes."""
        text = self._decoder.decode(self._piece(token))
        return self._stripped(text) if self._strip and text else text

    def finish(self) -> str:
        """U+FFFD for a truncated character, else nothing."""
        text = self._decoder.decode(b"", final=True)
        return self._stripped(text) if self._strip and text else text

    def _stripped(self, text: str) -> str:
        while self._strip and text.startswith(" "):
            text = text[1:]
            self._strip -= 1
        if text:
            self._strip = 0
        return text


class WindowDetokenizer:
    """Decodes by comparing a short window before and after a token; for any decoder at all.

    `decode` is the tokenizer's own. Text that ends in U+FFFD is held, for at most a few tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt[-_WINDOW_CONTEXT:])
        self._shown = len(self._ids)

    def push(self, token: int) -> str:
        """The text that the token completes."""
        self._ids.append(token)
        held = len(self._ids) - self._shown
        return self._advance(final=held > _WINDOW_HELD)

    def finish(self) -> str:
        """The text still held."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._decode(self._ids[: self._shown])
        after = self._decode(self._ids)
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not final):
            return ""
        start = max(0, self._shown - _WINDOW_CONTEXT)
        self._ids = self._ids[start:]
        self._shown = len(self._ids)
        return after[len(before) :]


def decode_all(detokenizer: Detokenizer, tokens: Iterable[int]) -> str:
    """The whole text at once."""
    return "".join([*map(detokenizer.push, tokens), detokenizer.finish()])

"""A compiled grammar, and the matchers that follow one choice's tokens each.

llguidance does the work: a lexer of derivatives and an Earley parser over the trie of the
vocabulary, so that a mask of 50,000 tokens takes tens of microseconds. Nothing of it raises for
what a grammar or a token does: a matcher that met a limit says so in `error` and stays there.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ropeway.compiler.errors import RequestError
from ropeway.runtime.sampling.structured import FIELD
from ropeway.runtime.structured.check import limits
from ropeway.runtime.structured.source import refusal

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

I32 = npt.NDArray[np.int32]

_PROBED_TOKENS = 2


class Grammar:
    """What a request asks of its text, compiled for one vocabulary; shared and never changed."""

    def __init__(self, start: "LLMatcher") -> None:
        self._start = start

    @classmethod
    def compile(cls, tokenizer: "LLTokenizer", source: str, kind: str) -> "Grammar":
        """Raises RequestError, with llguidance's words, for a grammar that it refuses, that is too
        large, or that no text but the empty one matches."""
        from llguidance import LLMatcher  # noqa: PLC0415

        start = LLMatcher(tokenizer, source, log_level=0, limits=limits())
        if start.is_error():
            raise refusal(kind, start.get_error())
        _probe(start.deep_copy(), tokenizer, kind)
        return cls(start)

    def matcher(self) -> "Matcher":
        """A matcher before its first token."""
        return Matcher(self._start.deep_copy())


class Matcher:
    """Follows one choice: which tokens may come next, and whether its text is complete."""

    def __init__(self, inner: "LLMatcher") -> None:
        self._inner = inner

    def fill(self, words: I32) -> None:
        """Writes the mask of the next token to i32 [ceil(V / 32)], bit i of word w for token
        32 w + i; no bit is set once `error` says why."""
        self._inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._inner.is_error():
            words[:] = 0

    def commit(self, token: int) -> None:
        """Take the token that was drawn."""
        self._inner.consume_token(token)

    @property
    def finished(self) -> bool:
        """Whether nothing can follow: the text is complete, ended or, see `error`, lost."""
        return self._inner.is_stopped()

    @property
    def error(self) -> str:
        """Why the matcher can't go on; empty while it can."""
        if not self._inner.is_error():
            return ""
        return str(refusal("grammar", self._inner.get_error())).replace(f"{FIELD}.grammar", FIELD)


def _probe(matcher: "LLMatcher", tokenizer: "LLTokenizer", kind: str) -> None:
    """Go a few tokens along: most grammars that exceed a limit do so at once, and one that matches
    nothing shows here."""
    words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    for step in range(_PROBED_TOKENS):
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise refusal(kind, matcher.get_error())
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        bits[tokenizer.eos_tokens] = 0
        token = int(bits.argmax())
        if not bits[token]:
            if step == 0:
                raise RequestError(f"{FIELD}.{kind}", "no text but the empty one matches it")
            return
        matcher.consume_token(token)
        if matcher.is_error():
            raise refusal(kind, matcher.get_error())
        if matcher.is_stopped():
            return

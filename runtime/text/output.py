"""The text of one generated sequence: tokens in, showable deltas and stop strings out."""

from collections.abc import Sequence

import msgspec

from ropeway.compiler.errors import RequestError
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.runtime.text.detokenizer import Detokenizer
from ropeway.runtime.text.stop import StopScanner
from ropeway.runtime.text.tokenizer import Tokenizer


class Delta(msgspec.Struct, frozen=True):
    """New text to show, and the stop string that ended the sequence, if one did."""

    text: str
    stop: str | None = None


class TextOutput:
    """Detokenizes one sequence and watches for its stop strings.

    Without a tokenizer, or with detokenize off, all text is "". Raises RequestError for stop
    strings without a tokenizer.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, prompt: Sequence[int] = ()
    ) -> None:
        if tokenizer is None and params.stop_strings:
            raise RequestError(
                "stop",
                "this program has no tokenizer to find stop strings with: use stop_token_ids",
            )
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = tokenizer.detokenizer(prompt, params.skip_special_tokens)
        stops = params.stop_strings
        self._include = params.include_stop_str_in_output
        self._scanner = StopScanner(stops, self._include) if stops else None
        self._min_tokens = params.min_tokens
        self._count = 0
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All deltas so far, together."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, token: int) -> Delta:
        """Takes the next token. After a delta with a stop string the sequence is over."""
        self._count += 1
        if self._detokenizer is None:
            return Delta("")
        return self._show(self._detokenizer.push(token))

    def finish(self, stop_token: int | None = None) -> Delta:
        """Releases what is left; call once, unless a stop string ended the sequence.

        `stop_token` is the end or stop token that ended it, not pushed before: its text shows only
        with include_stop_str_in_output.
        """
        if self._detokenizer is None:
            return Delta("")
        text = ""
        if stop_token is not None and self._include:
            self._count += 1
            text = self._detokenizer.push(stop_token)
        delta = self._show(text + self._detokenizer.finish())
        if delta.stop is None and self._scanner is not None:
            held = self._scanner.release()
            self._parts.append(held)
            return Delta(delta.text + held)
        return delta

    def _show(self, text: str) -> Delta:
        stop = None
        if self._scanner is not None and text:
            # As in vLLM, a stop string ends at the earliest in the token after min_tokens tokens,
            # just like a stop token.
            armed = self._count > self._min_tokens
            text, stop = self._scanner.feed(text, armed)
        if text:
            self._parts.append(text)
        return Delta(text, stop)

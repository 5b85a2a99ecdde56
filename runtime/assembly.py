"""From the engine's updates to outputs: text, stop strings, logprobs.

Contract: one Assembly per request, fed with all its updates in order. It alone decides where text
ends; a choice whose stop string was found is reported by `push`, so that the engine ends it too.
"""

import functools
from collections import deque
from collections.abc import Callable

from ropeway.compiler.errors import RunError
from ropeway.runtime.engine.messages import GenerationRequest, TokenLogprobs, Update
from ropeway.runtime.outputs import (
    CompletionDelta,
    CompletionOutput,
    Logprob,
    Logprobs,
    RequestOutput,
)
from ropeway.runtime.text.output import TextOutput
from ropeway.runtime.text.tokenizer import Tokenizer


class _Choice:
    """One choice on its way."""

    __slots__ = ("cumulative", "finish_reason", "ids", "logprobs", "pieces", "stop_reason", "text")

    def __init__(self, text: TextOutput) -> None:
        self.text = text
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[Logprobs] = []
        self.cumulative = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None


class Assembly:
    """Collects one request's output; with `streaming`, deltas too."""

    def __init__(
        self,
        request: GenerationRequest,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        *,
        streaming: bool = False,
    ) -> None:
        """Raises RequestError for stop strings without a tokenizer."""
        self.request = request
        self.deltas: deque[CompletionDelta] | None = deque() if streaming else None
        self.error: str | None = None
        self._prompt = prompt
        self._open = request.params.n
        self._cached = 0
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        self._decode = functools.cache(_decoder(tokenizer))
        self._choices = [
            _Choice(TextOutput(tokenizer, request.params, request.prompt))
            for _ in range(request.params.n)
        ]

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return self._open == 0

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache had; known with the first update."""
        return self._cached

    @property
    def output_tokens(self) -> int:
        """Tokens so far, over all choices."""
        return sum(len(choice.ids) for choice in self._choices)

    def push(self, update: Update) -> bool:
        """Take one update; True when the text of its choice is complete before the engine's end,
        which must then be told."""
        choice = self._choices[update.choice]
        if choice.finish_reason is not None:
            return False  # an update that was under way when a stop string was found
        self._cached = update.cached_tokens
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = update.prompt_logprobs
        text = ""
        found = None
        if update.token is not None:
            choice.ids.append(update.token)
            text, found = self._text(choice, update)
        if update.logprobs is not None:
            choice.cumulative += update.logprobs.logprob
            choice.logprobs.append(self._logprobs(update.logprobs))
        if found is not None:
            choice.finish_reason, choice.stop_reason = "stop", found
        elif update.finish_reason is not None:
            text += self._end(choice, update)
        if text:
            choice.pieces.append(text)
        if choice.finish_reason is not None:
            self._open -= 1
        if self.deltas is not None:
            self.deltas.append(self._delta(update, choice, text))
        return found is not None and update.finish_reason is None

    def _text(self, choice: _Choice, update: Update) -> tuple[str, str | None]:
        if update.token is None or update.finish_reason == "stop":
            return "", None  # an end token's text is `finish`'s affair
        delta = choice.text.push(update.token)
        return delta.text, delta.stop

    def _end(self, choice: _Choice, update: Update) -> str:
        choice.finish_reason, choice.stop_reason = update.finish_reason, update.stop_reason
        if update.finish_reason == "error":
            self.error = str(update.stop_reason)
        last = choice.text.finish(update.token if update.finish_reason == "stop" else None)
        if last.stop is not None:
            choice.finish_reason, choice.stop_reason = "stop", last.stop
        return last.text

    def _logprobs(self, entry: TokenLogprobs) -> Logprobs:
        decode = self._decode
        found = {entry.token: Logprob(entry.logprob, entry.rank, decode(entry.token))}
        for rank, (token, logprob) in enumerate(
            zip(entry.top_ids, entry.top_logprobs, strict=True), 1
        ):
            if token != entry.token:
                found[token] = Logprob(logprob, rank, decode(token))
        return found

    def _delta(self, update: Update, choice: _Choice, text: str) -> CompletionDelta:
        return CompletionDelta(
            request_id=update.request_id,
            index=update.choice,
            text=text,
            token_ids=[] if update.token is None else [update.token],
            logprobs=None if update.logprobs is None else [choice.logprobs[-1]],
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def raise_error(self) -> None:
        """Raises RunError when a choice ended by a failure."""
        if self.error is not None:
            raise RunError(f"request {self.request.request_id}: {self.error}")

    def output(self) -> RequestOutput:
        """The whole output of a finished request."""
        wants_logprobs = self.request.params.logprobs is not None
        prompt_logprobs: list[Logprobs | None] | None = None
        if self._prompt_logprobs is not None:
            prompt_logprobs = [None, *map(self._logprobs, self._prompt_logprobs)]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self.request.prompt),
            prompt_logprobs=prompt_logprobs,
            outputs=[
                CompletionOutput(
                    index=index,
                    text="".join(choice.pieces),
                    token_ids=choice.ids,
                    cumulative_logprob=choice.cumulative if wants_logprobs else None,
                    logprobs=choice.logprobs if wants_logprobs else None,
                    finish_reason=choice.finish_reason or "",
                    stop_reason=choice.stop_reason,
                )
                for index, choice in enumerate(self._choices)
            ],
            num_cached_tokens=self._cached,
        )


def _decoder(tokenizer: Tokenizer | None) -> Callable[[int], str]:
    if tokenizer is None:
        return lambda token: ""
    return tokenizer.token_text

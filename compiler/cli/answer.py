"""Printing an answer as it is generated, and how fast it came: for `generate` and `chat`."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ropeway.runtime.llm import LLM
from ropeway.runtime.sampling.params import SamplingParams


@dataclass(frozen=True)
class Answer:
    """A finished answer; times in seconds. `first` is from the request to the first token."""

    text: str
    prompt_tokens: int
    tokens: int
    first: float
    rest: float
    finish_reason: str | None

    def speed(self) -> str:
        """One line for a person."""
        line = (
            f"{self.prompt_tokens} prompt tokens, first token after {self.first * 1e3:.0f} ms; "
            f"{self.tokens} tokens"
        )
        if self.tokens > 1 and self.rest > 0:
            line += f" at {(self.tokens - 1) / self.rest:.1f} tokens/s"
        return f"{line} ({self.finish_reason})"


def print_answer(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> Answer:
    """Stream the continuation of `prompt` to stdout, piece by piece, with a newline at its end."""
    started = time.perf_counter()
    first = last = started
    pieces: list[str] = []
    tokens = 0
    reason = None
    for delta in llm.stream(prompt, params):
        last = time.perf_counter()
        if not tokens and delta.token_ids:
            first = last
        tokens += len(delta.token_ids)
        pieces.append(delta.text)
        reason = delta.finish_reason or reason
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return Answer("".join(pieces), len(prompt), tokens, first - started, last - first, reason)

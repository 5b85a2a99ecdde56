"""Printing an answer as it is generated, and how fast it came: for `generate` and `chat`."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ropeway.compiler.errors import InputError
from ropeway.runtime.llm import LLM
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Answer:
    """A finished answer; times in seconds. `first` is from the request to the first token.

    `limit` says which one ended it, where it isn't the number of tokens that was asked for.
    """

    text: str
    prompt_tokens: int
    tokens: int
    first: float
    rest: float
    finish_reason: str | None
    limit: str = ""

    def speed(self) -> str:
        """One line for a person."""
        line = (
            f"{self.prompt_tokens} prompt tokens, first token after {self.first * 1e3:.0f} ms; "
            f"{self.tokens} tokens"
        )
        if self.tokens > 1 and self.rest > 0:
            line += f" at {(self.tokens - 1) / self.rest:.1f} tokens/s"
        return f"{line} ({self.finish_reason}{self.limit and f': {self.limit}'})"


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
    limit = ""
    if reason == "length" and tokens != params.max_tokens:
        limit = f"the program's context of {llm.max_model_len} tokens is full"
    return Answer(
        "".join(pieces), len(prompt), tokens, first - started, last - first, reason, limit
    )


def text_tokenizer(llm: LLM) -> Tokenizer:
    """The program's tokenizer. Raises InputError, worded for a command line, when it has none."""
    if not llm.artifact.names("tokenizer/"):
        raise InputError(
            f"{llm.artifact.path}: no tokenizer came with the model, so it takes and gives token "
            f"ids: use ropeway.LLM in Python, or compile a checkpoint that brings a tokenizer"
        )
    return llm.tokenizer

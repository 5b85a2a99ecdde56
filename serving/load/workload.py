"""What is sent: prompts of ShareGPT-like lengths, of fixed lengths, or from a JSONL file.

Contract: the same seed gives the same prompts. Each run of a sweep draws fresh ones of the same
lengths, since a server with a prefix cache would have kept those of the run before.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ropeway.compiler.errors import InputError

# Lengths in tokens of first questions and answers in ShareGPT_V3, as load generators use them:
# prompts of 4 to 1,024 tokens, at most 2,048 with the answer. Runs over it that were published
# average 215 to 230 and 185 to 205. Both are near log-normal; these (median, sigma) average 221 and
# 200 after the same cuts.
SHAREGPT_PROMPT = (160.0, 1.4)
SHAREGPT_OUTPUT = (110.0, 1.2)
LEAST, MOST_PROMPT, MOST_TOTAL = 4, 1024, 2048
# Room for a BOS, a chat template's tokens, and words that are two tokens for a small vocabulary.
MARGIN = 32

# Each is one token, with the space before it, for nearly every vocabulary of some size.
_TEXT = """
the of and to in is that it was for on are as with his they at be this from have or by one
had not but what all were when we there can an your which their said if do will each about
how up out them then she many some so these would other into has more her two like him see
time could no make than first been its who now people my made over did down only way find
use may water long little very after words called just where most know get through back much
before go good new write our used me man too any day same right look think also around
another came come work three word must because does part even place well such here take why
things help put years different away again off went old number great tell men say small every
found still between name should home big give air line set own under read last never us left
end along while might next sound below saw something thought both few those always looked show
"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class Ask:
    """One request: a prompt as text or token ids, or chat messages, and how much to answer.

    `at` is its moment in seconds where a file dictates the schedule; `extra` holds further fields.
    """

    prompt: str | Sequence[int] | list[dict[str, Any]]
    max_tokens: int
    at: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def sharegpt_lengths(count: int, most_total: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens of `count` requests, drawn again until they keep within the cuts and,
    together, within `most_total`; raises InputError where hardly any would."""
    most_total = min(MOST_TOTAL, most_total)
    if most_total < 32:
        raise InputError(
            f"a context of {most_total} tokens is too short for conversations: give "
            "--prompt-tokens and --output-tokens"
        )
    draw = np.random.default_rng([seed, 2])
    found: list[tuple[int, int]] = []
    while len(found) < count:
        prompts, outputs = (
            np.exp(np.log(median) + sigma * draw.standard_normal(4 * count)).astype(int)
            for median, sigma in (SHAREGPT_PROMPT, SHAREGPT_OUTPUT)
        )
        kept = (prompts >= LEAST) & (prompts <= MOST_PROMPT) & (outputs >= LEAST)
        kept &= prompts + outputs <= most_total
        found += zip(prompts[kept].tolist(), outputs[kept].tolist(), strict=True)
    return found[:count]


@dataclass(frozen=True)
class Synthetic:
    """Prompts of random words, about one token each, or of ids drawn from `ids`: exact lengths."""

    lengths: Sequence[tuple[int, int]]
    seed: int
    ids: Sequence[int] | None = None
    chat: bool = False

    def asks(self, turn: int) -> list[Ask]:
        """The requests of one run of a sweep."""
        draw = np.random.default_rng([self.seed, 3, turn])
        pool: np.ndarray = np.array(WORDS if self.ids is None else self.ids)
        found = []
        for prompt_tokens, output_tokens in self.lengths:
            drawn = draw.choice(pool, prompt_tokens).tolist()
            prompt = drawn if self.ids is not None else " ".join(drawn)
            found.append(Ask(as_messages(prompt) if self.chat else prompt, output_tokens))
        return found


@dataclass(frozen=True)
class Written:
    """The requests of a file: the same in every run."""

    lines: Sequence[Ask]

    def asks(self, turn: int) -> list[Ask]:
        """See Synthetic.asks."""
        return list(self.lines)


def as_messages(prompt: str) -> list[dict[str, Any]]:
    """A prompt as one message of a user."""
    return [{"role": "user", "content": prompt}]


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a workload file. Either `prompt` (text or token ids) or `messages`; `at` is a
    moment in seconds from the start, on all lines or on none; `extra` goes into the request."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int = 128
    at: float | None = None
    extra: dict[str, Any] = {}


def read_workload(path: Path, *, chat: bool) -> Written:
    """The requests in a JSONL file, one object a line; raises InputError with the line's number."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--workload {path}: can't be read: {error}") from error
    asks = [
        _ask(line, f"--workload {path}, line {number}", chat)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not asks:
        raise InputError(f"--workload {path}: holds no request: write one JSON object a line")
    if len({ask.at is None for ask in asks}) > 1:
        raise InputError(f"--workload {path}: `at` stands on some lines only: give it to all")
    return Written(sorted(asks, key=lambda ask: ask.at or 0.0))


def _ask(text: str, where: str, chat: bool) -> Ask:
    try:
        line = msgspec.json.decode(text, type=Line)
    except msgspec.DecodeError as error:
        raise InputError(f"{where}: {error}{_nearest(text)}") from error
    if (line.prompt is None) == (line.messages is None):
        raise InputError(f"{where}: give either `prompt` or `messages`")
    if line.max_tokens < 1 or (line.at is not None and not line.at >= 0):
        raise InputError(f"{where}: max_tokens must be at least 1, and `at` at least 0")
    if not (line.prompt or line.messages):
        raise InputError(f"{where}: the prompt is empty")
    if chat and line.messages is None:
        if not isinstance(line.prompt, str):
            raise InputError(f"{where}: token ids can't be sent as chat: leave out --chat")
        return Ask(as_messages(line.prompt), line.max_tokens, line.at, line.extra)
    if not chat and line.messages is not None:
        raise InputError(f"{where}: `messages` need --chat")
    return Ask(line.messages or line.prompt or "", line.max_tokens, line.at, line.extra)


def _nearest(text: str) -> str:
    """A hint for a misspelt field."""
    try:
        names = set(json.loads(text)) - set(Line.__struct_fields__)
    except (ValueError, TypeError, RecursionError):
        return ""
    close = [get_close_matches(str(name), Line.__struct_fields__, n=1) for name in sorted(names)]
    return "".join(f": did you mean `{match[0]}`?" for match in close[:1] if match)

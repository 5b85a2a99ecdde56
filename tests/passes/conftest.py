"""Goldens: IR files whose comments say what to run and what must come out.

`# RUN: spec`, `# MATCHES: pass count`, `# MISS: text of the nearest miss`, `# TOKENS: n` (how many
the interpreter takes, where a pass fixes it), and FileCheck lines.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser, pattern_for_opts

GOLDENS = Path(__file__).parent / "goldens"


@dataclass(frozen=True)
class Golden:
    """One file: its text, the spec it runs, and what it says of matches and misses."""

    path: Path
    text: str
    spec: str
    matches: tuple[tuple[str, int], ...]
    miss: str | None
    tokens: int

    @classmethod
    def read(cls, path: Path) -> Golden:
        text = path.read_text(encoding="utf-8")
        counts = re.findall(r"^# MATCHES: (\S+) (\d+)$", text, re.MULTILINE)
        miss = re.search(r"^# MISS: (.+)$", text, re.MULTILINE)
        tokens = re.search(r"^# TOKENS: (\d+)$", text, re.MULTILINE)
        return cls(
            path,
            text,
            re.findall(r"^# RUN: (.+)$", text, re.MULTILINE)[0],
            tuple((name, int(count)) for name, count in counts),
            miss[1] if miss else None,
            int(tokens[1]) if tokens else 6,
        )


@pytest.fixture(params=sorted(GOLDENS.glob("*.ir")), ids=lambda path: path.stem)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden.read(request.param)


@pytest.fixture
def check_text() -> Callable[[Path, str], bool]:
    """check(checks, text): whether `text` satisfies the FileCheck lines of the file `checks`."""

    def check(checks: Path, text: str) -> bool:
        options = Options(match_filename=str(checks))
        stream = io.StringIO(checks.read_text(encoding="utf-8"))
        parser = Parser(options, stream, *pattern_for_opts(options))
        return Matcher(options, FInput("<printed>", text), parser).run() == 0

    return check

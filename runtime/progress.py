"""The progress line of a generation: on stderr, and only where a person watches."""

import sys
import time
from collections.abc import Sequence
from types import TracebackType

from ropeway.runtime.assembly import Assembly

_INTERVAL = 0.1  # seconds between two repaints
_PATIENCE = 0.5  # a run shorter than this shows nothing


class GenerationProgress:
    """`3/16 prompts, 412 tokens, 310 tokens/s`, repainted in place and erased at the end."""

    def __init__(self, total: int, *, enabled: bool = True) -> None:
        self._enabled = enabled and total > 0 and sys.stderr.isatty()
        self._total = total
        self._began = time.perf_counter()
        self._next = self._began + _PATIENCE
        self._painted = False

    def update(self, assemblies: Sequence[Assembly]) -> None:
        """Repaint, if it is time."""
        if not self._enabled:
            return
        now = time.perf_counter()
        if now < self._next:
            return
        self._next = now + _INTERVAL
        done = sum(1 for assembly in assemblies if assembly.finished)
        tokens = sum(assembly.output_tokens for assembly in assemblies)
        rate = tokens / (now - self._began)
        line = f"{done}/{self._total} prompts, {tokens} tokens, {rate:.0f} tokens/s"
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()
        self._painted = True

    def __enter__(self) -> "GenerationProgress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._painted:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

"""A lock that whoever waits gets next.

A thread that steps the engine in a loop releases its lock only to take it again; with a plain lock
a second thread, waiting to add or abort a request, could be kept out for the whole loop.
"""

import os
import threading
from types import TracebackType

from ropeway.compiler.errors import RunError
from ropeway.runtime.interrupts import DeferredSignals


class FairLock:
    """Reentrant, for `with`. A thread that releases it can't retake it before one that waits.

    While the main thread holds it, signal handlers wait for the release: what the lock guards
    is never left half done. A forked child, which may have inherited it locked by a thread that it
    lacks, is refused.
    """

    def __init__(self) -> None:
        self._entry = threading.Lock()  # held while waiting, so that a releaser queues behind
        self._inner = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._process = os.getpid()
        self._signals = DeferredSignals()

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made the lock."""
        return os.getpid() != self._process

    def __enter__(self) -> "FairLock":
        if self.forked:
            raise RunError("this LLM was made before a fork: make a new one in the child")
        me = threading.get_ident()
        if self._owner != me:
            signals = DeferredSignals()
            signals.enter()
            with self._entry:
                self._inner.acquire()
            self._owner = me
            self._signals = signals
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            signals = self._signals
            self._owner = None
            self._inner.release()
            signals.leave()

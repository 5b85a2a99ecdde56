"""A lock that whoever waits gets next.

A thread that steps the engine in a loop releases its lock only to take it again; with a plain lock
a second thread, waiting to add or abort a request, could be kept out for the whole loop.
"""

import threading
from types import TracebackType


class FairLock:
    """Reentrant, for `with`. A thread that releases it can't retake it before one that waits."""

    def __init__(self) -> None:
        self._entry = threading.Lock()  # held while waiting, so that a releaser queues behind
        self._inner = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> "FairLock":
        me = threading.get_ident()
        if self._owner != me:
            with self._entry:
                self._inner.acquire()
            self._owner = me
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
            self._owner = None
            self._inner.release()

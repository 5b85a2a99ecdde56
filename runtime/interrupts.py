"""Signals that wait for a moment when nothing is half done.

Python runs a signal's handler between any two instructions of the main thread. One that raises
(Ctrl-C, a time limit by SIGALRM, a SIGTERM that exits) would in the middle of a step leave blocks
held, requests unowned or a lock taken for ever.
"""

import signal
import threading
from types import FrameType
from typing import Any

# Those that programs set handlers for; asking for all 62 would cost 0.1 ms a step.
_CATCHABLE = tuple(
    getattr(signal, name)
    for name in (
        "SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGVTALRM",
        "SIGPROF", "SIGXCPU",
    )
    if hasattr(signal, name)
)  # fmt: skip
_ATTEMPTS = 3  # signal.signal runs pending handlers first, and installs nothing when one raises


class DeferredSignals:
    """Between `enter` and `leave` signals with a handler in Python are only noted.

    Does something only in the main thread, the one in which handlers run. Not reentrant.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._noted: list[tuple[int, FrameType | None]] = []

    def enter(self) -> None:
        """Hold handlers back from now on. A handler may still raise from here; nothing is held
        back then."""
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _CATCHABLE:
                handler = signal.getsignal(number)
                if callable(handler):  # else it is ignored, ends the process, or isn't Python's
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        except BaseException:
            self._restore()
            raise

    def leave(self) -> None:
        """Put the handlers back, and run those whose signal came; the first error is raised."""
        handlers, noted = self._handlers, self._noted
        failure = self._restore()
        for number, frame in noted:
            try:
                handlers[number](number, frame)
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            try:
                raise failure
            finally:
                # The error's traceback holds this frame: a cycle would keep what the caller had
                # in hand, its requests, alive until the collector runs.
                del failure, noted

    def _restore(self) -> BaseException | None:
        """Put every handler back; the first error of those that ran as they came back."""
        handlers, self._handlers, self._noted = self._handlers, {}, []
        failure: BaseException | None = None
        for number, handler in handlers.items():
            for _ in range(_ATTEMPTS):
                try:
                    signal.signal(number, handler)
                    break
                except BaseException as error:
                    failure = failure or error
        return failure

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append((number, frame))

"""Ctrl-C that waits for a moment when nothing is half done.

Python raises KeyboardInterrupt between any two instructions of the main thread: in the middle of a
step it would leave blocks held, requests unowned or a lock taken for ever.
"""

import signal
import threading
from types import FrameType
from typing import Any


class DeferredInterrupts:
    """Between `enter` and `leave` an interrupt is only noted; `leave` lets it happen.

    Does something only in the main thread, the one that Python interrupts. Not reentrant.
    """

    def __init__(self) -> None:
        self._previous: Any = None
        self._noted: tuple[int, FrameType | None] | None = None

    def enter(self) -> None:
        """Hold interrupts back from now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous):  # else the signal is ignored, kills, or isn't Python's
            self._previous = previous
            signal.signal(signal.SIGINT, self._note)

    def leave(self) -> None:
        """Put the handler back, and run it if an interrupt came. It may raise."""
        if self._previous is None:
            return
        if threading.current_thread() is not threading.main_thread():
            return
        previous, noted = self._previous, self._noted
        self._previous, self._noted = None, None
        signal.signal(signal.SIGINT, previous)
        if noted is not None:
            previous(*noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = (number, frame)

"""The thread team of the native library."""

import ctypes
import os
import weakref
from typing import Any

from numpy.typing import NDArray

from ropeway.compiler.errors import RunError
from ropeway.runtime.devices.cpu.library import load_library


class Team:
    """Threads that persist from step to step; the caller is one of them."""

    def __init__(self, size: int) -> None:
        """Start size - 1 threads.

        A team that takes every usable core keeps each thread on one, unless $ROPEWAY_PIN is `off`.
        Raises RunError when the system refuses.
        """
        self.size = size
        self._process = os.getpid()
        self._library = load_library()
        self.handle = self._library.rw_team_create(size, _pins())
        if not self.handle:
            raise RunError(f"can't start {size} threads: lower num_threads")
        self._free = weakref.finalize(self, _destroy, self._library, self.handle, self._process)

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, task: int, argument: int) -> None:
        """Call the native function at address `task` with (argument, rank, size) on each thread."""
        self.check_process()
        self._library.rw_team_run(self.handle, task, argument)

    def check_process(self) -> None:
        """Refuse to run in a forked child, which has the memory but not the threads: it would hang.

        Raises RunError.
        """
        if os.getpid() != self._process:
            raise RunError(
                "the program was loaded before this process was forked, and its threads weren't "
                "copied: load it in the child, or start processes by spawn"
            )

    def read(self, data: NDArray[Any]) -> int:
        """Read a contiguous array once, every thread its part: the memory bandwidth probe."""
        self.check_process()
        found: int = self._library.rw_team_read(self.handle, data.ctypes.data, data.nbytes)
        return found

    def close(self) -> None:
        """Stop the threads; a second call does nothing."""
        self._free()


def _pins() -> bool:
    wanted = os.environ.get("ROPEWAY_PIN", "auto")
    if wanted not in ("auto", "off"):
        raise RunError(f"ROPEWAY_PIN={wanted!r}: use auto or off")
    return wanted == "auto"


def _destroy(library: ctypes.CDLL, handle: int, process: int) -> None:
    """Stop the threads, unless this is a forked child, where joining them would hang."""
    if os.getpid() == process:
        library.rw_team_destroy(handle)

"""The thread team of the native library."""

import weakref
from typing import Any

from numpy.typing import NDArray

from ropeway.compiler.errors import RunError
from ropeway.runtime.devices.cpu.library import load_library


class Team:
    """Threads that persist from step to step; the caller is one of them."""

    def __init__(self, size: int) -> None:
        """Start size - 1 threads. Raises RunError when the system refuses."""
        self.size = size
        self._library = load_library()
        self.handle = self._library.rw_team_create(size)
        if not self.handle:
            raise RunError(f"can't start {size} threads: lower num_threads")
        self._free = weakref.finalize(self, self._library.rw_team_destroy, self.handle)

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, task: int, argument: int) -> None:
        """Call the native function at address `task` with (argument, rank, size) on each thread."""
        self._library.rw_team_run(self.handle, task, argument)

    def read(self, data: NDArray[Any]) -> int:
        """Read a contiguous array once, every thread its part: the memory bandwidth probe."""
        found: int = self._library.rw_team_read(self.handle, data.ctypes.data, data.nbytes)
        return found

    def close(self) -> None:
        """Stop the threads; a second call does nothing."""
        self._free()

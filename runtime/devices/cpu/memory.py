"""Memory of the CPU device: anonymous mappings, which cost nothing until they are written."""

import ctypes
import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ropeway.compiler.errors import RunError

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE_WEIGHTS = 16 << 20  # bytes
Pattern = bytes  # under a name that Region.bytes doesn't hide
_FILL_PIECE = 64 << 10  # bytes copied at a time: they stay in the L2 cache


class Region:
    """Zeroed, page-aligned memory; large ones ask for huge pages, unless they are `sparse`."""

    def __init__(self, size: int, what: str, *, sparse: bool = False) -> None:
        """Map `size` bytes, of which few are used where it is `sparse`.

        Raises RunError naming `what` when the system refuses.
        """
        self.size = size
        try:
            # Private: the default, shared, is never given huge pages (attention 15% slower).
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._mapping = mmap.mmap(-1, max(size, 1), flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise RunError(
                f"no memory for {what} ({size} bytes): {error}: lower kv_cache_memory or compile "
                f"with smaller buckets"
            ) from None
        if hasattr(mmap, "MADV_HUGEPAGE") and size >= 4 << 20 and not sparse:
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._view = (ctypes.c_char * max(size, 1)).from_buffer(self._mapping)
        self.address = ctypes.addressof(self._view)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The region as an array that keeps it alive."""
        return np.frombuffer(memoryview(self._view).cast("B"), np.uint8, self.size)

    def fill(self, offset: int, size: int, pattern: Pattern) -> None:
        """Set `size` bytes from `offset` on to `pattern`, repeated from the region's start."""
        piece = memoryview(pattern * max(1, _FILL_PIECE // len(pattern)))
        memory = memoryview(self._view).cast("B")
        end = offset + size
        while offset < end:
            skipped = offset % len(piece)
            count = min(len(piece) - skipped, end - offset)
            memory[offset : offset + count] = piece[skipped : skipped + count]
            offset += count

    def array(self, offset: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """float32 values at a byte offset, without a copy."""
        count = int(np.prod(shape))
        raw = np.frombuffer(memoryview(self._view).cast("B"), np.uint8, 4 * count, offset)
        return raw.view(np.float32).reshape(shape)


def weight_memory(size: int) -> NDArray[np.uint8] | None:
    """Memory to read weights into, in pages of 2 MiB: GEMMs run 3 to 5% faster than from a mapped
    file, which has small pages. None where it isn't worth it: small files, systems without such
    pages, or too little memory to hold the file's cached pages and these at once."""
    if size < _HUGE_WEIGHTS or not hasattr(mmap, "MADV_HUGEPAGE") or 2 * size > available_bytes():
        return None
    try:
        if "[never]" in _HUGE_PAGES.read_text(encoding="ascii"):
            return None
        return Region(size, "the weights").bytes
    except (OSError, RunError):
        return None


def available_bytes() -> int:
    """Memory that a new allocation could get, as the kernel estimates it; 0 when unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0

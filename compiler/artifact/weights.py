"""The weight file: safetensors, with every tensor's data at a multiple of 64 bytes.

It is mapped, or read into memory that the caller gives.

Other readers of safetensors can read it: alignment is reached by padding the header with spaces
and by small u8 tensors named `__pad__.N`, since the format allows no holes.
Invariant of WeightFile: every entry lies inside the file, is aligned, and has the size that its
dtype and shape give; the parser refuses anything else.
"""

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from threading import Semaphore

import msgspec
import numpy as np
import numpy.typing as npt

from ropeway.compiler.errors import ArtifactError

ALIGNMENT = 64
_PAD = "__pad__."
_MAX_HEADER = 100 << 20
_READ = 8 << 20  # bytes a thread reads at a time
_MEANWHILE = 256 << 20  # bytes a thread reads beside other work, in about as long as that takes
_SIZES = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4, "i64": 8, "i8": 1, "u8": 1, "bool": 1}
_NUMPY = {"f32": "<f4", "bf16": "<u2", "f16": "<f2", "i32": "<i4", "i64": "<i8", "i8": "i1"}

Array = npt.NDArray[np.generic]
Buffer = bytes | bytearray | memoryview | Array


class WeightEntry(msgspec.Struct, frozen=True):
    """A tensor to be written: `load` gives its data when its turn comes, in C order.

    `dtype` is the IR's name (bf16 ...); `shape` is the shape as stored, packed if it is packed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Buffer]

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return prod(self.shape) * dtype_size(self.dtype)


class StoredTensor(msgspec.Struct, frozen=True):
    """Where a tensor lies: `offset` counts bytes from the start of the mapping."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _HeaderEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def dtype_size(dtype: str) -> int:
    """Bytes of one element of an IR dtype. Raises ArtifactError for a name that isn't one."""
    if dtype not in _SIZES:
        raise ArtifactError(f"dtype {dtype!r} can't be stored: use one of {', '.join(_SIZES)}")
    return _SIZES[dtype]


def encode_weights(entries: Sequence[WeightEntry]) -> Iterator[memoryview]:
    """The file, piece by piece; each tensor's data is asked for once, in order, and let go."""
    header: dict[str, object] = {"__metadata__": {"format": "ropeway"}}
    gaps: list[int] = []
    offset = 0
    for number, entry in enumerate(entries):
        if entry.name in header or entry.name.startswith("__"):
            raise ArtifactError(f"weight {entry.name!r} is written twice or has a reserved name")
        header[entry.name] = _entry(entry.dtype, entry.shape, offset, entry.nbytes)
        offset += entry.nbytes
        gaps.append(-offset % ALIGNMENT)
        if gaps[-1]:
            header[f"{_PAD}{number}"] = _entry("u8", (gaps[-1],), offset, gaps[-1])
            offset += gaps[-1]
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for entry, gap in zip(entries, gaps, strict=True):
        yield _bytes_of(entry)
        if gap:
            yield memoryview(bytes(gap))


def _entry(dtype: str, shape: tuple[int, ...], start: int, size: int) -> dict[str, object]:
    return {"dtype": dtype.upper(), "shape": shape, "data_offsets": (start, start + size)}


def _bytes_of(entry: WeightEntry) -> memoryview:
    data = entry.load()
    if isinstance(data, np.ndarray):
        view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    else:
        view = memoryview(data).cast("B")
    if view.nbytes != entry.nbytes:
        raise ArtifactError(
            f"weight {entry.name!r}: {view.nbytes} bytes of data, but {entry.dtype}"
            f"{list(entry.shape)} takes {entry.nbytes}"
        )
    return view


Place = Callable[[int], npt.NDArray[np.uint8] | None]
"""Size in bytes -> page-aligned memory of that size to read a file into; None: map the file."""


class WeightFile:
    """A weight file in memory. `tensors` says where each lies; `data` is the whole file, read-only.

    The memory lives as long as `data` or any view of it is referenced. Where the file is mapped,
    it must not be truncated while it is used.
    """

    def __init__(
        self,
        path: Path,
        place: Place | None = None,
        threads: int = 1,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Parse `path`, mapped or read by `threads` threads to where `place` says.

        `meanwhile` is called once, where the file is read beside the threads.
        Raises ArtifactError when it can't be read or breaks the format.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 8:
                    raise ArtifactError(f"{path}: {size} bytes: truncated, compile it again")
                memory = place(size) if place else None
                if memory is None:
                    mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
                    memory = np.frombuffer(mapping, dtype=np.uint8)
                    if meanwhile:
                        meanwhile()
                else:
                    _read_into(memory, file.fileno(), path, threads, meanwhile)
                    memory.flags.writeable = False
        except OSError as error:
            raise ArtifactError(f"{path}: can't be read ({error.strerror})") from error
        self.data: npt.NDArray[np.uint8] = memory
        self.tensors: dict[str, StoredTensor] = _parse(self.data, path)

    @property
    def address(self) -> int:
        """Where the file starts in memory; page aligned."""
        return int(self.data.ctypes.data)

    def view(self, name: str) -> Array:
        """A tensor without a copy; bf16 comes as uint16. An unknown name raises ArtifactError."""
        stored = self.tensors.get(name)
        if stored is None:
            raise ArtifactError(f"{self.path}: holds no weight {name!r}: compile the model again")
        raw = self.data[stored.offset : stored.offset + stored.nbytes]
        return raw.view(_NUMPY.get(stored.dtype, "u1")).reshape(stored.shape)


def _read_into(
    memory: npt.NDArray[np.uint8],
    file: int,
    path: Path,
    threads: int,
    meanwhile: Callable[[], None] | None,
) -> None:
    """While `meanwhile` runs, one thread fewer reads, each in as few calls as the system takes:
    between two of them it would wait for the interpreter, which `meanwhile` may keep to itself."""
    view = memory.data
    begun = Semaphore(0)

    def read(start: int, size: int) -> None:
        begun.release()  # from here on to the call of preadv, this thread has the interpreter
        stop = min(start + size, len(view))
        while start < stop:
            got = os.preadv(file, [view[start:stop]], start)
            if got == 0:
                raise ArtifactError(f"{path}: truncated while it was read: compile it again")
            start += got

    with ThreadPoolExecutor(threads) as pool:
        reads, next_start = [], 0
        if meanwhile:
            readers = max(1, threads - 1)
            part = min(-(-len(view) // readers) + _READ, _MEANWHILE) // _READ * _READ
            for _ in range(readers):
                reads.append(pool.submit(read, next_start, part))
                next_start += part
            for _ in range(readers):
                begun.acquire()
            meanwhile()
        for start in range(next_start, len(view), _READ):
            reads.append(pool.submit(read, start, _READ))
        for done in reads:
            done.result()


def _parse(data: npt.NDArray[np.uint8], path: Path) -> dict[str, StoredTensor]:
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(_MAX_HEADER, data.nbytes - 8):
        raise ArtifactError(f"{path}: its header claims {length} bytes: damaged, compile it again")
    start = 8 + length
    if start % ALIGNMENT:
        raise ArtifactError(f"{path}: tensor data starts at byte {start}: not 64-byte aligned")
    try:
        raw = msgspec.json.decode(data[8:start].tobytes(), type=dict[str, msgspec.Raw])
        entries = {
            name: msgspec.json.decode(value, type=_HeaderEntry)
            for name, value in raw.items()
            if name != "__metadata__"
        }
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: its header is damaged ({error}): compile it again") from error
    tensors = {}
    for name, stored in _placed(entries.items(), start, data.nbytes, path):
        if not name.startswith(_PAD):
            tensors[name] = stored
    return tensors


def _placed(
    entries: Iterable[tuple[str, _HeaderEntry]], start: int, size: int, path: Path
) -> Iterator[tuple[str, StoredTensor]]:
    """The entries in file order, each checked to begin where the one before ended."""
    end = start
    for name, entry in sorted(entries, key=lambda item: item[1].data_offsets):
        dtype = entry.dtype.lower()
        if dtype not in _SIZES or any(dim < 0 for dim in entry.shape):
            raise ArtifactError(f"{path}: weight {name!r} has type {entry.dtype}{entry.shape}")
        nbytes = prod(entry.shape) * _SIZES[dtype]
        first, last = (start + offset for offset in entry.data_offsets)
        if first != end or last != first + nbytes or last > size:
            raise ArtifactError(f"{path}: weight {name!r} lies outside its place: damaged")
        if not name.startswith(_PAD) and first % ALIGNMENT:
            raise ArtifactError(f"{path}: weight {name!r} at byte {first}: not 64-byte aligned")
        yield name, StoredTensor(dtype, entry.shape, first, nbytes)
        end = last
    if end != size:
        raise ArtifactError(f"{path}: {size} bytes, but its tensors end at {end}: damaged")

"""Tensors of safetensors files, memory-mapped, every header checked before anything is read.

A header that doesn't describe its file exactly (too short, overlapping or missing bytes, unknown
element types, a name twice) is refused with the file's name.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ropeway.compiler.errors import CheckpointError

_MAX_HEADER = 1 << 27
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
_NAMES = {"F64": "f64", "F32": "f32", "BF16": "bf16", "F16": "f16", "I64": "i64", "I32": "i32"}
_OTHER_SIZES = {
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "U32": 4,
    "U64": 8,
}


@dataclass(frozen=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsSource:
    """A TensorSource over one or many safetensors files."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Reads and checks the headers. Raises CheckpointError."""
        self._entries: dict[str, _Entry] = {}
        self._maps: dict[Path, np.memmap[Any, np.dtype[np.uint8]]] = {}
        for file in files:
            for name, entry in _read_header(file).items():
                if name in self._entries:
                    other = self._entries[name].file.name
                    raise CheckpointError(
                        f"{file.name}: tensor {name!r} is in {other} too; a checkpoint must hold "
                        "each tensor once"
                    )
                self._entries[name] = entry

    def names(self) -> list[str]:
        """All names, in the order of files and headers."""
        return list(self._entries)

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) from the header."""
        entry = self._entry(name)
        return _NAMES.get(entry.dtype, entry.dtype.lower()), entry.shape

    def file_of(self, name: str) -> str:
        """The file that holds a tensor, for errors."""
        return self._entry(name).file.name

    def get(self, name: str) -> torch.Tensor:
        """The tensor, a view of the mapped file: don't write into it."""
        entry = self._entry(name)
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(f"{entry.file.name}: tensor {name!r} is {entry.dtype}")
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, np.uint8, mode="c")
        data = self._maps[entry.file][entry.start : entry.start + entry.nbytes]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.from_numpy(data).view(dtype).reshape(entry.shape)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}")
        return self._entries[name]


def _read_header(file: Path) -> dict[str, _Entry]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(f"{file.name}: truncated or not a safetensors file")
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file.name}: can't be read ({error.strerror})") from error
    header = _parse(file, text)
    header.pop("__metadata__", None)
    entries = {name: _entry(file, name, item, 8 + length) for name, item in header.items()}
    _check_layout(file, entries, 8 + length, size)
    return entries


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise CheckpointError(f"{file.name}: tensor {key!r} stands twice in the header")
            found[key] = value
        return found

    try:
        header = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.name}: the header isn't JSON; the file is damaged") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.name}: the header isn't an object; the file is damaged")
    return header


def _entry(file: Path, name: str, item: Any, base: int) -> _Entry:
    try:
        dtype, shape, (start, stop) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        numbers = (*shape, start, stop)
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
            raise ValueError("sizes must be integers that aren't negative")
        itemsize = _DTYPES[dtype].itemsize if dtype in _DTYPES else _OTHER_SIZES[dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file.name}: the header's entry of {name!r} can't be read ({error})"
        ) from error
    if math.prod(shape) * itemsize != stop - start:
        raise CheckpointError(
            f"{file.name}: tensor {name!r} {dtype}{list(shape)} doesn't fill its "
            f"{stop - start} bytes; the file is damaged"
        )
    return _Entry(file, dtype, shape, base + start, stop - start)


def _check_layout(file: Path, entries: dict[str, _Entry], base: int, size: int) -> None:
    at = base
    for name, entry in sorted(entries.items(), key=lambda pair: (pair[1].start, pair[1].nbytes)):
        if entry.start != at:
            raise CheckpointError(
                f"{file.name}: tensor {name!r} leaves a gap or overlaps another; file damaged"
            )
        at += entry.nbytes
    if at != size:
        what = "truncated" if at > size else "too long"
        raise CheckpointError(
            f"{file.name}: {what}: the header describes {at} bytes and the file has {size}"
        )

"""The checksum: its definition, and that any changed byte changes it."""

from __future__ import annotations

import numpy as np
import pytest
from support import kernel_calls as kc


def defined(data: np.ndarray, first: int) -> int:
    """sum h(w_i) (1 + (first + i) C) mod 2^64 with Python's integers."""
    padded = data.tobytes() + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    step = 0x3C6EF372FE94F82A
    terms = ((w ^ (w >> 32)) * (1 + (first + i) * step) for i, w in enumerate(words))
    return sum(terms) % 2**64


def native(data: np.ndarray, first: int = 0) -> int:
    lib = kc.library()
    if lib is None:
        pytest.skip("the native kernels are not built")
    return int(lib.ropeway_checksum_words(data.ctypes.data, data.size, first))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 63, 64, 65, 200, 1000])
def test_checksum_is_as_defined(size: int, rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, size).astype(np.uint8)
    for first in (0, 1, 12345, 2**40):
        assert native(data, first) == defined(data, first)


def test_pieces_add_up(rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, 1003).astype(np.uint8)
    pieces = [(0, 96), (96, 104), (104, 1003)]
    assert sum(native(data[a:b], a // 8) for a, b in pieces) % 2**64 == native(data)


def test_every_byte_matters(rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, 300).astype(np.uint8)
    whole = native(data)
    for i in range(data.size):
        changed = data.copy()
        changed[i] ^= 1 << (i % 8)
        assert native(changed) != whole
    swapped = data.copy()
    swapped[[0, 8]] = swapped[[8, 0]]
    assert native(swapped) != whole


def test_bandwidth_probe_reads_all(level: str) -> None:
    data = kc.aligned((4096,), kc.F32)
    seconds = kc.run(level, "read_sum", kc.Reading(data.ctypes.data, data.nbytes), threads=2)
    assert 0 < seconds < 1

"""A 64-bit checksum at memory speed, for files too large to hash with sha256 at every load.

Definition. The data is cut into 64-bit little-endian words w[0], w[1], ..., the last one zero
padded. All mod 2**64, with h(w) = w ^ (w >> 32) and m[i] = 1 + i * STEP (STEP is even, so every
m[i] is odd):

    checksum = size in bytes + sum over i of h(w[i]) * m[i]

h is a bijection and m[i] is invertible, so any change inside one word changes the sum; h spreads
the top bits, so that flips of the same high bit in two words don't cancel; exchanging two words
changes it by STEP * (i - j) * (h(a) - h(b)). It finds accidents, not forgeries: sha256 is beside
it for those.

`word_sum` is the sum without the size, for a run of words that starts at index `first`: sums of
disjoint runs add up, so the file may be summed in parallel. A native twin may stand in for it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

STEP = 0x3C6EF372FE94F82A
_MASK = (1 << 64) - 1
_CHUNK = 1 << 15  # words: 256 KiB, so that the temporaries stay in the L2 cache
_PARALLEL = 1 << 23  # bytes a thread takes at a time

Bytes = npt.NDArray[np.uint8]
WordSum = Callable[[Bytes, int], int]
"""(bytes as a contiguous u8 array, index of its first word) -> sum mod 2**64."""


def word_sum(data: Bytes, first: int) -> int:
    """The checksum's sum over `data`, whose first word has index `first`."""
    whole = data.nbytes // 8
    words = data[: whole * 8].view("<u8")
    total = 0
    multipliers = np.arange(min(whole, _CHUNK), dtype=np.uint64) * np.uint64(STEP) + np.uint64(1)
    for start in range(0, whole, _CHUNK):
        chunk = words[start : start + _CHUNK]
        mixed = chunk ^ (chunk >> np.uint64(32))
        plain = int(mixed.sum(dtype=np.uint64))
        scaled = int((mixed * multipliers[: len(chunk)]).sum(dtype=np.uint64))
        total += scaled + (first + start) * STEP * plain
    tail = int.from_bytes(data[whole * 8 :].tobytes(), "little")
    total += (tail ^ (tail >> 32)) * (1 + (first + whole) * STEP)
    return total & _MASK


def checksum64(data: Bytes, sums: WordSum = word_sum, threads: int = 1) -> int:
    """The checksum of a contiguous u8 array; `sums` may be a native twin of `word_sum`."""
    starts = range(0, data.nbytes, _PARALLEL)

    def part(start: int) -> int:
        return sums(data[start : start + _PARALLEL], start // 8)

    if threads > 1 and len(starts) > 1:
        with ThreadPoolExecutor(threads) as pool:
            total = sum(pool.map(part, starts))
    else:
        total = sum(map(part, starts))
    return (data.nbytes + total) & _MASK


def checksum_hex(data: Bytes, sums: WordSum = word_sum, threads: int = 1) -> str:
    """`checksum64` as 16 hex digits, the form that manifests hold."""
    return f"{checksum64(data, sums, threads):016x}"

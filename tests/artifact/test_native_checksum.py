"""The native checksum is the numpy one, on any size, start and alignment."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ropeway.compiler.artifact.checksum import checksum64, word_sum
from ropeway.runtime.checksum import fastest_word_sum

RANDOM = np.random.default_rng(5).integers(0, 256, 70_000, dtype=np.uint8)


@given(st.integers(0, 4000), st.integers(0, 66_000), st.integers(0, 2**40) | st.just(2**61 - 1))
def test_twins_agree(start: int, size: int, first: int) -> None:
    data = RANDOM[start : start + size]
    assert fastest_word_sum()(data, first) == word_sum(data, first)


def test_parts_add_up_natively() -> None:
    big = np.tile(RANDOM, 250)  # 17.5 MB: three parts
    assert checksum64(big, fastest_word_sum(), threads=3) == checksum64(big)

"""Step limits: what the buckets allow, and which bucket a step gets."""

import pytest

from ropeway.compiler.config import Bucket, default_buckets
from ropeway.compiler.errors import InputError
from ropeway.runtime.engine.limits import step_limits

DECODE = Bucket("decode", 8, 8, 8)
MIXED = Bucket("mixed", 64, 8, 8)


def test_defaults_take_the_widest_bucket() -> None:
    limits = step_limits(default_buckets(256, 2048))
    assert (limits.max_tokens, limits.max_seqs, limits.max_rows) == (2048, 256, 256)
    assert limits.max_chunk == 2048


def test_budget_above_every_bucket_is_refused_with_the_most_that_fits() -> None:
    with pytest.raises(InputError, match=r"max_num_batched_tokens=65 .*mixed-64x8x8.*at most 64"):
        step_limits([DECODE, MIXED], max_num_batched_tokens=65)


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk"])
def test_sizes_below_one_are_refused(field: str) -> None:
    with pytest.raises(InputError, match=f"{field}=0"):
        step_limits([MIXED], **{field: 0})


def test_no_buckets_is_an_error() -> None:
    with pytest.raises(InputError, match="no buckets"):
        step_limits([])


def test_sequences_are_held_to_requests_rows_and_budget() -> None:
    assert step_limits([Bucket("mixed", 64, 4, 8)]).max_seqs == 4
    assert step_limits([Bucket("mixed", 64, 8, 3)]).max_seqs == 3
    assert step_limits([MIXED], max_num_batched_tokens=5).max_seqs == 5
    assert step_limits([MIXED], max_num_seqs=2).max_seqs == 2


def test_decode_buckets_alone_prefill_token_by_token() -> None:
    limits = step_limits([DECODE])
    assert (limits.max_chunk, limits.max_tokens) == (1, 8)


@pytest.mark.parametrize(
    ("tokens", "requests", "rows", "expected"),
    [
        (1, 1, 1, "decode-1"),
        (1, 1, 0, "decode-1"),  # a chunk of one token in the middle of a prompt
        (4, 4, 4, "decode-4"),
        (5, 5, 5, "decode-8"),
        (8, 8, 8, "decode-8"),
        (2, 1, 1, "mixed-64x8x8"),
        (9, 8, 8, "mixed-64x8x8"),
        (64, 1, 8, "mixed-64x8x8"),
        (65, 1, 1, "mixed-128x8x8"),
    ],
)
def test_bucket_is_the_smallest_that_holds_the_shape(
    tokens: int, requests: int, rows: int, expected: str
) -> None:
    assert step_limits(default_buckets(8, 128)).choose(tokens, requests, rows).name == expected


def test_one_token_each_goes_to_a_mixed_bucket_when_no_decode_bucket_is_wide_enough() -> None:
    limits = step_limits([Bucket("decode", 2, 2, 2), MIXED])
    assert limits.choose(3, 3, 3) == MIXED

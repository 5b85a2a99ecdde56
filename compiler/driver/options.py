"""What a user asks of `compile`, checked and put into the forms that the compiler works with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ropeway.compiler.config import Bucket, default_buckets
from ropeway.compiler.errors import InputError

MAX_NUM_SEQS = 256
"""Requests in a step when no buckets are given."""

MAX_NUM_BATCHED_TOKENS = 2048
"""Tokens in a step when nothing else is asked for."""

_DTYPES = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float32": "f32",
    "float": "f32",
    "f32": "f32",
}

Progress = Callable[[str, int, int], None]
"""(what is being done, steps done, steps in all)."""


def silent(what: str, done: int, total: int) -> None:
    """A progress callback that does nothing."""


@dataclass(frozen=True)
class CompileOptions:
    """Checked options; `dtype` is the IR's name, `max_model_len` None means the model's own."""

    target: str
    dtype: str
    max_model_len: int | None
    buckets: tuple[Bucket, ...]
    max_num_batched_tokens: int


def check_options(
    target: str,
    dtype: object,
    max_model_len: int | None,
    buckets: Sequence[Bucket] | None,
    max_num_batched_tokens: int,
) -> CompileOptions:
    """Options as `compile` takes them. Raises InputError naming the argument and valid values."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise InputError(f"dtype: {dtype!r} isn't supported: use 'bfloat16' or 'float32'")
    if not isinstance(target, str):
        raise InputError(f"target: {target!r} isn't a name: use 'cpu' or 'reference'")
    _positive("max_num_batched_tokens", max_num_batched_tokens)
    if max_model_len is not None:
        _positive("max_model_len", max_model_len)
    if buckets is None:
        requests = min(MAX_NUM_SEQS, max_num_batched_tokens)
        buckets = default_buckets(requests, max_num_batched_tokens)
    return CompileOptions(
        target=target,
        dtype=_DTYPES[name],
        max_model_len=max_model_len,
        buckets=_check_buckets(buckets, max_num_batched_tokens),
        max_num_batched_tokens=max_num_batched_tokens,
    )


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}: {value!r} isn't a positive whole number")


def _check_buckets(buckets: Sequence[Bucket], budget: int) -> tuple[Bucket, ...]:
    if not isinstance(buckets, Sequence):
        raise InputError(f"buckets: {buckets!r} isn't a list of ropeway.Bucket")
    if not buckets:
        raise InputError("buckets: the list is empty: give one of each kind, or None for defaults")
    for bucket in buckets:
        if not isinstance(bucket, Bucket):
            raise InputError(f"buckets: {bucket!r} isn't a ropeway.Bucket")
        sizes = (bucket.tokens, bucket.requests, bucket.rows)
        if any(type(size) is not int for size in sizes):
            raise InputError(f"buckets: {bucket!r}: its sizes aren't all whole numbers")
        if min(sizes) < 1 or max(bucket.requests, bucket.rows) > bucket.tokens:
            raise InputError(
                f"buckets: {bucket.name} is impossible: tokens >= requests, rows and all positive"
            )
        if bucket.kind == "decode" and len(set(sizes)) != 1:
            raise InputError(f"buckets: {bucket.name}: a decode step has tokens = requests = rows")
        if bucket.tokens > budget:
            raise InputError(
                f"buckets: {bucket.name} is larger than max_num_batched_tokens {budget}: raise "
                f"that, or drop the bucket"
            )
    for kind in ("decode", "mixed"):
        if all(bucket.kind != kind for bucket in buckets):
            raise InputError(f"buckets: none of kind {kind!r}: every program needs one")
    return tuple(sorted(set(buckets)))

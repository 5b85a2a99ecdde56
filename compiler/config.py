"""Settings that the compiler and the runtime share: buckets and their choice."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from ropeway.compiler.errors import InputError

BucketKind = Literal["decode", "mixed"]


class Bucket(msgspec.Struct, frozen=True, order=True):
    """One static step shape: upper bounds on tokens (T), requests (R) and wanted rows (L).

    A `decode` step gives each request one token, so T = R = L. A `mixed` step holds prefill
    chunks beside decodes.
    """

    kind: BucketKind
    tokens: int
    requests: int
    rows: int

    @property
    def name(self) -> str:
        """A short stable name, also the stem of the bucket's file in an artifact."""
        if self.kind == "decode":
            return f"decode-{self.tokens}"
        return f"{self.kind}-{self.tokens}x{self.requests}x{self.rows}"


def default_buckets(max_num_seqs: int = 256, max_num_batched_tokens: int = 2048) -> list[Bucket]:
    """Powers of two up to both limits, the limits themselves included."""
    decode = [Bucket("decode", n, n, n) for n in _powers(1, max_num_seqs)]
    mixed = [
        Bucket("mixed", n, min(n, max_num_seqs), min(n, max_num_seqs))
        for n in _powers(min(64, max_num_batched_tokens), max_num_batched_tokens)
    ]
    return decode + mixed


def _powers(first: int, last: int) -> list[int]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(2 * sizes[-1], last))
    return sizes


def choose_bucket(
    buckets: Sequence[Bucket], kind: BucketKind, tokens: int, requests: int, rows: int
) -> Bucket:
    """The smallest bucket of `kind` that holds the step; a size equal to a bucket's maps to it.

    Raises InputError when none is large enough.
    """
    fitting = [
        b
        for b in buckets
        if b.kind == kind and b.tokens >= tokens and b.requests >= requests and b.rows >= rows
    ]
    if not fitting:
        raise InputError(
            f"no {kind} bucket holds {tokens} tokens, {requests} requests and {rows} rows: "
            f"compile with larger buckets, or lower max_num_batched_tokens"
        )
    return min(fitting, key=lambda b: (b.tokens, b.requests, b.rows))

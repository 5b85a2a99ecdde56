"""The sizes a step may have, derived from the program's buckets and the caller's wishes.

Contract: every step within these limits fits a bucket, because one bucket (`widest`) dominates
them all; so a plan never has to be checked against the bucket list.
"""

from collections.abc import Sequence

import msgspec

from ropeway.compiler.config import Bucket, choose_bucket
from ropeway.compiler.errors import InputError


class StepLimits(msgspec.Struct, frozen=True):
    """Upper bounds of one step, in tokens; `max_chunk` bounds one sequence's share of it."""

    buckets: tuple[Bucket, ...]
    max_tokens: int
    max_seqs: int
    max_rows: int
    max_chunk: int

    def choose(self, tokens: int, requests: int, rows: int) -> Bucket:
        """The smallest bucket for a step within the limits.

        The kind depends on the shape alone: one token per request is a decode step, be it a
        generated token or a chunk of one.
        """
        if tokens == requests:
            for bucket in self.buckets:
                if bucket.kind == "decode" and bucket.requests >= requests:
                    return choose_bucket(self.buckets, "decode", tokens, requests, rows)
        return choose_bucket(self.buckets, "mixed", tokens, requests, rows)


def step_limits(
    buckets: Sequence[Bucket],
    *,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int | None = None,
    max_prefill_chunk: int | None = None,
) -> StepLimits:
    """The limits of a program with `buckets`.

    None takes the most that the buckets allow. max_num_seqs is an upper bound: fewer sequences run
    at once when the buckets or the token budget hold fewer. A program with decode buckets only
    prefills one token at a time. Raises InputError for a value below 1, a budget above the largest
    bucket, or no bucket at all.
    """
    _check_positive("max_num_seqs", max_num_seqs)
    _check_positive("max_num_batched_tokens", max_num_batched_tokens)
    _check_positive("max_prefill_chunk", max_prefill_chunk)
    if not buckets:
        raise InputError("the program has no buckets: compile it again with a bucket list")
    mixed = [b for b in buckets if b.kind == "mixed"]
    widest = max(mixed or buckets, key=lambda b: (b.tokens, b.requests, b.rows))
    budget = max_num_batched_tokens or widest.tokens
    if budget > widest.tokens:
        raise InputError(
            f"max_num_batched_tokens={budget} exceeds the largest bucket, {widest.name}: give at "
            f"most {widest.tokens}, or compile with a larger max_num_batched_tokens"
        )
    chunk = min(max_prefill_chunk or budget, budget)
    return StepLimits(
        buckets=tuple(sorted(buckets)),
        max_tokens=budget,
        max_seqs=min(max_num_seqs, widest.requests, widest.rows, budget),
        max_rows=widest.rows,
        max_chunk=chunk if mixed else 1,
    )


def _check_positive(field: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InputError(f"{field}={value} must be at least 1")

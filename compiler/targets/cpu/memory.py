"""Places buffers in one arena so that two share bytes only when they are never live together.

A buffer lives from the first step that touches it to the last, both included, so a step's results
never overlap its operands. Largest first, each at the lowest free offset: within a few percent of
the lower bound on transformer graphs, and lifetimes are compared once for all buckets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ropeway.compiler.config import Bucket
from ropeway.compiler.targets.cpu.plan import (
    ALIGNMENT,
    BucketPlan,
    Template,
    row_capacity,
)


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """For each buffer the step span in which it holds data, and the buffers it overlaps in time."""

    spans: tuple[tuple[int, int], ...]
    conflicts: tuple[tuple[int, ...], ...]


def lifetimes(template: Template) -> Lifetimes:
    """Spans by first and last use; the logits live to the end, for the sampler."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, step in enumerate(template.steps):
        for ref in step.operands.values():
            if ref.space == "arena":
                first.setdefault(ref.index, number)
                last[ref.index] = number
    last[template.logits.index] = len(template.steps)
    spans = tuple(
        (first.get(buffer, 0), last.get(buffer, 0)) for buffer in range(len(template.buffers))
    )
    return Lifetimes(spans, _conflicts(spans))


def _conflicts(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Buffers whose spans intersect, by a sweep over the starts."""
    conflicts: list[list[int]] = [[] for _ in spans]
    live: list[int] = []
    for buffer in sorted(range(len(spans)), key=lambda b: spans[b]):
        live = [other for other in live if spans[other][1] >= spans[buffer][0]]
        for other in live:
            conflicts[buffer].append(other)
            conflicts[other].append(buffer)
        live.append(buffer)
    return tuple(tuple(found) for found in conflicts)


def place(sizes: Sequence[int], alive: Lifetimes) -> tuple[list[int], int]:
    """(offset of each buffer, bytes of the arena) for buffers of `sizes` bytes."""
    offsets = [-1] * len(sizes)
    total = 0
    for buffer in sorted(range(len(sizes)), key=lambda b: (-sizes[b], alive.spans[b])):
        taken = sorted(
            (offsets[other], offsets[other] + sizes[other])
            for other in alive.conflicts[buffer]
            if offsets[other] >= 0
        )
        offset = 0
        for start, end in taken:
            if offset + sizes[buffer] <= start:
                break
            offset = max(offset, end)
        offsets[buffer] = offset
        total = max(total, offset + sizes[buffer])
    return offsets, total


def plan_bucket(template: Template, alive: Lifetimes, bucket: Bucket) -> BucketPlan:
    """The plan of one bucket."""
    offsets, total = place(buffer_sizes(template, bucket), alive)
    return BucketPlan(bucket=bucket, arena_bytes=total, offsets=offsets)


def buffer_sizes(template: Template, bucket: Bucket) -> list[int]:
    """Bytes of each buffer when the bucket is full."""
    return [
        -(-row_capacity(bucket, buffer.rows) * buffer.row_bytes // ALIGNMENT) * ALIGNMENT
        for buffer in template.buffers
    ]

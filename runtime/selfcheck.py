"""The check that every bucket passes before a program serves: nothing but true rows counts.

Each bucket runs twice with at most 2 true rows: once with everything else (arena, padding rows,
unused KV blocks) filled with NaN and once with zeros. The logits of the true rows must be bit-equal
and hold no NaN, and the first row, which is the same request everywhere, must be the same bits in
every bucket. A kernel or a plan that reads a padding row, an unwritten buffer or a stranger's block
fails loading with the bucket and the op; the op is found by running prefixes of the plan.

A step with 2 rows takes as long as reading the weights, so buckets run together, step by step, each
in an arena of its own: the weights come from memory twice in all instead of twice per bucket.
"""

import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import RunError
from ropeway.compiler.targets.cpu.plan import (
    ITEM_SIZES,
    BucketPlan,
    Ref,
    Step,
    row_capacity,
)
from ropeway.runtime.devices.base import Float32Array, StepInputs
from ropeway.runtime.devices.cpu.program import CacheMemory

if TYPE_CHECKING:
    from ropeway.runtime.devices.cpu.program import Program

TRUE_ROWS = 2
# Rows of a buffer that are filled: the true ones and all that a tile of 16 rows could touch. The
# whole of a full-size bucket (50 MB for SmolLM2) would take longer to fill than the steps to run.
_FILLED_ROWS = 18
_WAVE_BYTES = 1 << 30  # arenas mapped at a time; only the filled rows take memory
_NAN, _ZERO = 0xFF, 0x00  # bytes: 0xFF.. is a NaN in f32 and bf16
_RESULTS = ("y", "sum", "q_out", "k_out")
_BLOCKS = TRUE_ROWS + 1  # KV blocks of a bucket: one per request, and one that stays unused


def check_program(program: "Program") -> None:
    """Run the check for every bucket. Raises RunError naming the first bad bucket and its op."""
    for wave in _waves(program.plans.values()):
        _Wave(program, wave).run()


def _waves(plans: Iterable[BucketPlan]) -> Iterator[list[BucketPlan]]:
    """Plans in groups whose arenas fit the limit together."""
    wave: list[BucketPlan] = []
    for plan in plans:
        if wave and sum(p.arena_bytes for p in (*wave, plan)) > _WAVE_BYTES:
            yield wave
            wave = []
        wave.append(plan)
    if wave:
        yield wave


@dataclass(frozen=True, slots=True)
class _Job:
    """A bucket's small step, and which bytes of the shared arena are filled for it."""

    bucket: Bucket
    inputs: StepInputs
    ranges: Sequence[tuple[int, int]]


class _Wave:
    """A second program over the same template and weights, with an arena for each bucket."""

    def __init__(self, program: "Program", plans: Sequence[BucketPlan]) -> None:
        base, shifted = 0, {}
        for plan in plans:
            shifted[plan.bucket] = BucketPlan(
                bucket=plan.bucket,
                arena_bytes=base + plan.arena_bytes,
                offsets=[base + offset for offset in plan.offsets],
            )
            base += -(-plan.arena_bytes // 4096) * 4096
        self._program = program.twin(shifted)
        self._caches = CacheMemory(program.template, 1 + _BLOCKS * len(plans))
        self._jobs = [
            _Job(
                bucket,
                small_step(bucket, program.groups, 1 + _BLOCKS * number),
                _filled_ranges(self._program, bucket),
            )
            for number, bucket in enumerate(shifted)
        ]

    def run(self) -> None:
        try:
            self._program.set_caches(self._caches)
            poisoned, clean = self._outputs(self._jobs, _NAN), self._outputs(self._jobs, _ZERO)
            for job, bad, good in zip(self._jobs, poisoned, clean, strict=True):
                if not np.isfinite(good).all() or bad.tobytes() != good.tobytes():
                    raise self._error(job, None)
            self._compare(clean)
        finally:
            self._program.close()

    def _compare(self, clean: Sequence[Float32Array]) -> None:
        """The first token is the same in every bucket, and so must be its logits."""
        first = {
            number: logits[0].tobytes()
            for number, (job, logits) in enumerate(zip(self._jobs, clean, strict=True))
            if job.inputs.rows[0] == 0
        }
        counted = Counter(first.values()).most_common(1)
        for number, found in first.items():
            if found != counted[0][0]:
                peer = next(n for n, other in first.items() if other == counted[0][0])
                raise self._error(self._jobs[number], self._jobs[peer])

    def _error(self, job: _Job, peer: _Job | None) -> RunError:
        number = self._first_bad_step(job, peer)
        step = self._program.template.steps[number]
        return RunError(
            f"self-check of bucket {job.bucket.name} failed at step {number}, {step.op} (kernel "
            f"{step.kernel}): its true rows depend on padding, or aren't numbers: don't use this "
            f"program; compile it again, and if that doesn't help please report it"
        )

    def _outputs(self, jobs: Sequence[_Job], fill: int, steps: int = -1) -> list[Float32Array]:
        """The logits of each job after its first `steps` steps over memory full of `fill`."""
        for job in jobs:
            for offset, size in job.ranges:
                ctypes.memset(self._program.arena.address + offset, fill, size)
        self._caches.fill(fill)
        self._program.run_together([(job.bucket, job.inputs) for job in jobs], steps)
        return [self._program.logits(job.bucket, len(job.inputs.rows)).copy() for job in jobs]

    def _first_bad_step(self, job: _Job, peer: _Job | None) -> int:
        """Bisects: from the first bad step on, something that steps wrote is bad."""
        low, high = 0, len(self._program.template.steps) - 1
        while low < high:
            middle = (low + high) // 2
            if self._is_bad(job, peer, middle):
                high = middle
            else:
                low = middle + 1
        return low

    def _is_bad(self, job: _Job, peer: _Job | None, number: int) -> bool:
        """Whether the true rows that the last writing step up to `number` left are bad.

        They are when they depend on the fill, aren't finite, or the first isn't as in `peer`.
        """
        steps = self._program.template.steps
        while number > 0 and not _results(steps[number]):
            number -= 1
        step, jobs = steps[number], [job, *([peer] if peer else [])]
        self._outputs(jobs, _NAN, number + 1)
        poisoned = [self._read(job, step, ref) for ref in _results(step)]
        self._outputs(jobs, _ZERO, number + 1)
        for ref, bad in zip(_results(step), poisoned, strict=True):
            good = self._read(job, step, ref)
            if bad.tobytes() != good.tobytes() or not np.isfinite(good).all():
                return True
            if peer and self._read(peer, step, ref)[0].tobytes() != good[0].tobytes():
                return True
        return False

    def _read(self, job: _Job, step: Step, ref: Ref) -> Float32Array:
        """The true rows of a result, as float32."""
        program = self._program
        counts = dict(zip(("tokens", "requests", "rows"), job.inputs.counts, strict=True))
        row_bytes = program.template.buffers[ref.index].row_bytes
        start = program.plans[job.bucket].offsets[ref.index]
        item = ITEM_SIZES[ref.dtype]
        raw = program.arena.bytes[start : start + counts[step.rows] * row_bytes]
        words: NDArray[np.unsignedinteger] = raw.view(np.uint16 if item == 2 else np.uint32)
        columns = np.full((1,) * len(ref.shape), ref.offset // item)
        for axis, (size, stride) in enumerate(zip(ref.shape, ref.strides, strict=True)):
            shape = [1] * len(ref.shape)
            shape[axis] = size
            columns = columns + (np.arange(size) * stride).reshape(shape)
        rows = words.reshape(-1, row_bytes // item)[:, columns.reshape(-1)]
        found = rows.astype(np.uint32)
        return (found << 16 if item == 2 else found).view(np.float32)


def _results(step: Step) -> list[Ref]:
    return [step.operands[name] for name in _RESULTS if name in step.operands]


def small_step(bucket: Bucket, groups: int, first_block: int = 1) -> StepInputs:
    """At most 2 true rows: two requests in a decode bucket, else one request with two tokens.

    Request r has block first_block + r; every sequence starts at position 0.
    """
    tokens = min(TRUE_ROWS, bucket.tokens)
    requests = min(tokens, bucket.requests) if bucket.kind == "decode" else 1
    per_request = tokens // requests
    tokens = per_request * requests
    positions = np.tile(np.arange(per_request, dtype=np.int32), requests)
    table = np.arange(first_block, first_block + requests, dtype=np.int32).reshape(requests, 1)
    blocks = np.repeat(table[:, 0], per_request)
    return StepInputs(
        ids=np.arange(1, tokens + 1, dtype=np.int32) % 2,
        positions=positions,
        slots=[blocks * np.int32(32) + positions] * groups,
        block_tables=[table] * groups,
        query_start=np.arange(requests + 1, dtype=np.int32) * np.int32(per_request),
        lengths=np.full(requests, per_request, np.int32),
        rows=np.arange(max(0, tokens - bucket.rows), tokens, dtype=np.int32),
    )


def _filled_ranges(program: "Program", bucket: Bucket) -> Sequence[tuple[int, int]]:
    """(offset, bytes) of the arena parts to fill: the first rows of each buffer, merged."""
    spans = []
    for offset, buffer in zip(program.plans[bucket].offsets, program.template.buffers, strict=True):
        rows = min(row_capacity(bucket, buffer.rows), _FILLED_ROWS)
        spans.append((offset, offset + rows * buffer.row_bytes))
    merged: list[list[int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end - start) for start, end in merged]

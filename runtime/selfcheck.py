"""The check that every bucket passes before a program serves: nothing but true rows counts.

Every bucket runs with at most 2 true rows, and everything else (arena, padding rows, unused KV
blocks) is filled with a poison. The logits of the true rows must be finite and the same bits as
those that a bucket computes for the same tokens when all of that is zero. A kernel or a plan that
reads a padding row, an unwritten buffer or a stranger's block fails loading with the bucket and the
op; the op is found by running prefixes of the plan, poisoned and clean.

Why one poisoned run a bucket is enough. In every aligned 8 bytes of the poison, read as f32 or as
bf16, lie a NaN and a number near the largest. A sum or a product is spoilt by either; 0 * x is by
the NaN, a maximum that drops NaN by the number. So whatever reads two neighbours of what isn't its
own, be it a row, a vector or a cache line, comes out wrong, or doesn't depend on them. To catch
one that reads a lone element too, neighbouring buckets have the two exchanged: each kernel meets
both. What every bucket gets wrong alike is seen against the clean run, which no poison reaches.

A step with 2 rows takes as long as reading the weights, so buckets run together, step by step, each
in an arena of its own: the weights come from memory once for all of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import RunError
from ropeway.compiler.targets.cpu.plan import (
    ITEM_SIZES,
    BucketPlan,
    Ref,
    RowKind,
    Step,
    Template,
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
_CLEAN = bytes(64)
# Two words of f32, or twice two of bf16 (little endian): a NaN and 3.4e38. The second line of a
# pattern has them exchanged, so that rows an odd number of lines apart differ in each column.
_WORDS = (b"\x7f\x7f\xff\xff", b"\xff\xff\x7f\x7f")
_LINES = (b"".join(_WORDS) * 8, b"".join(reversed(_WORDS)) * 8)
POISONS = (b"".join(_LINES), b"".join(reversed(_LINES)))
_FILLS = (_CLEAN, *POISONS)
_RESULTS = ("y", "sum", "q_out", "k_out")

_Sequence = tuple[int, ...]
"""Token ids up to and including a row's own: rows of the same sequence are the same bits."""


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


class _Job(msgspec.Struct, frozen=True):
    """A bucket's small step, with the bytes of the arena and the blocks that are filled for it."""

    bucket: Bucket
    inputs: StepInputs
    ranges: Sequence[tuple[int, int]]
    blocks: range


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
        self._program = program.sparse_twin(shifted)
        self._jobs: list[_Job] = []
        self._unused: list[int] = []  # blocks, one behind those of each kind of bucket
        row_limits = _row_limits(program.template)
        block = 1
        for _, buckets in groupby(shifted, lambda bucket: bucket.kind):
            for bucket in buckets:
                inputs = small_step(bucket, program.groups, block)
                own = range(block, block + len(inputs.lengths))
                ranges = _filled_ranges(self._program, bucket, row_limits)
                self._jobs.append(_Job(bucket, inputs, ranges, own))
                block = own.stop
            self._unused.append(block)
            block += 1
        self._caches = CacheMemory(program.template, block)

    def run(self) -> None:
        try:
            self._program.set_caches(self._caches)
            self._caches.fill(POISONS[0], self._unused)
            suspect = self._suspect()
            if suspect is not None:
                raise self._blame(suspect)
        finally:
            self._program.close()

    def _suspect(self) -> _Job | None:
        """A job whose poisoned rows aren't those of a clean run, if there is one."""
        poisons = [POISONS[number % 2] for number in range(len(self._jobs))]
        poisoned = self._outputs(self._jobs, poisons)
        peers = _covering(self._jobs)
        expected: dict[_Sequence, bytes] = {}
        for job, logits in zip(peers, self._outputs(peers, [_CLEAN] * len(peers)), strict=True):
            if not np.isfinite(logits).all():
                return job
            expected |= _by_sequence(job, "rows", logits)
        for job, logits in zip(self._jobs, poisoned, strict=True):
            found = _by_sequence(job, "rows", logits)
            if any(row != expected[sequence] for sequence, row in found.items()):
                return job
        return None

    def _blame(self, suspect: _Job) -> RunError:
        """Names the first bucket that depends on the fill, else the first that a majority opposes.

        A fault that doesn't show again is the suspect's.
        """
        clean, *others = (self._outputs(self._jobs, [fill] * len(self._jobs)) for fill in _FILLS)
        for job, good, *poisoned in zip(self._jobs, clean, *others, strict=True):
            if _depends(good, poisoned):
                return self._error(job, None)
        rows = [_by_sequence(job, "rows", one) for job, one in zip(self._jobs, clean, strict=True)]
        votes = Counter(item for found in rows for item in found.items())
        for job, found in zip(self._jobs, rows, strict=True):
            for sequence, row in found.items():
                rivals = [other[sequence] for other in rows if sequence in other]
                best = max(rivals, key=lambda rival: votes[sequence, rival])
                if row != best:
                    number = next(n for n, other in enumerate(rows) if other.get(sequence) == best)
                    return self._error(job, self._jobs[number])
        return self._error(suspect, None)

    def _error(self, job: _Job, peer: _Job | None) -> RunError:
        number = self._first_bad_step(job, peer)
        step = self._program.template.steps[number]
        return RunError(
            f"self-check of bucket {job.bucket.name} failed at step {number}, {step.op} (kernel "
            f"{step.kernel}): its true rows depend on padding, or aren't numbers: don't use this "
            f"program; compile it again, and if that doesn't help please report it"
        )

    def _outputs(
        self, jobs: Sequence[_Job], fills: Sequence[bytes], steps: int = -1
    ) -> list[Float32Array]:
        """The logits of each job after its first `steps` steps over memory full of its fill."""
        for job, fill in zip(jobs, fills, strict=True):
            for offset, size in job.ranges:
                self._program.arena.fill(offset, size, fill)
            self._caches.fill(fill, job.blocks)
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

        They are when they depend on the fill, aren't finite, or aren't as in `peer`.
        """
        steps = self._program.template.steps
        while number > 0 and not _results(steps[number]):
            number -= 1
        step, jobs = steps[number], [job, *([peer] if peer else [])]
        runs = []
        for fill in _FILLS:
            self._outputs(jobs, [fill] * len(jobs), number + 1)
            runs.append([[self._read(one, step, ref) for one in jobs] for ref in _results(step)])
        for clean, *others in zip(*runs, strict=True):
            if _depends(clean[0], [poisoned[0] for poisoned in others]):
                return True
            mine, *theirs = (
                _by_sequence(one, step.rows, rows) for one, rows in zip(jobs, clean, strict=True)
            )
            if any(mine.get(name, row) != row for other in theirs for name, row in other.items()):
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


def _depends(clean: Float32Array, poisoned: Iterable[Float32Array]) -> bool:
    """Whether rows aren't numbers, or other bits over another fill."""
    if not np.isfinite(clean).all():
        return True
    return any(rows.tobytes() != clean.tobytes() for rows in poisoned)


def _covering(jobs: Iterable[_Job]) -> list[_Job]:
    """Few jobs that compute a row of every sequence."""
    known: set[_Sequence] = set()
    chosen = []
    for job in sorted(jobs, key=lambda job: -len(job.inputs.rows)):
        own = set(_sequences(job.inputs, "rows"))
        if not own <= known:
            chosen.append(job)
            known |= own
    return chosen


def _by_sequence(job: _Job, kind: RowKind, rows: Float32Array) -> dict[_Sequence, bytes]:
    """The bits of each row, by what it stands for."""
    names = _sequences(job.inputs, kind)
    return {name: row.tobytes() for name, row in zip(names, rows, strict=True)}


def _sequences(inputs: StepInputs, kind: RowKind) -> list[_Sequence]:
    """What the rows of a kind stand for; a request stands for all of its tokens."""
    starts = inputs.query_start.tolist()
    ends = {
        "tokens": range(1, len(inputs.ids) + 1),
        "requests": starts[1:],
        "rows": [row + 1 for row in inputs.rows.tolist()],
    }[kind]
    ids = inputs.ids.tolist()
    return [tuple(ids[max(start for start in starts if start < end) : end]) for end in ends]


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


def _row_limits(template: Template) -> list[int]:
    """Rows of each buffer to fill. Where no step reads it (the logits), only true rows can err."""
    read = {
        ref.index
        for step in template.steps
        for name, ref in step.operands.items()
        if ref.space == "arena" and name not in _RESULTS
    }
    return [_FILLED_ROWS if n in read else TRUE_ROWS for n in range(len(template.buffers))]


def _filled_ranges(
    program: "Program", bucket: Bucket, row_limits: Sequence[int]
) -> Sequence[tuple[int, int]]:
    """(offset, bytes) of the arena parts to fill: the first rows of each buffer, merged."""
    ends: dict[int, int] = {}  # many buffers lie in one place, one after the other
    for offset, buffer, limit in zip(
        program.plans[bucket].offsets, program.template.buffers, row_limits, strict=True
    ):
        end = offset + min(row_capacity(bucket, buffer.rows), limit) * buffer.row_bytes
        ends[offset] = max(ends.get(offset, 0), end)
    merged: list[list[int]] = []
    for start, end in sorted(ends.items()):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end - start) for start, end in merged]

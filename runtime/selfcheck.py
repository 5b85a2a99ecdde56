"""The check that every bucket passes before a program serves: nothing but true rows counts.

Each bucket runs twice with at most 2 true rows: once with everything else (arena, padding rows,
unused KV blocks) filled with NaN and once with zeros. The logits of the true rows must be bit-equal
and hold no NaN. A kernel or a plan that reads a padding row, an unwritten buffer or a stranger's
block fails loading with the bucket and the op; the op is found by running prefixes of the plan.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import RunError
from ropeway.compiler.targets.cpu.plan import ITEM_SIZES, Ref, Step, row_capacity
from ropeway.runtime.devices.base import StepInputs
from ropeway.runtime.devices.cpu.program import CacheMemory

if TYPE_CHECKING:
    from ropeway.runtime.devices.cpu.program import Program

TRUE_ROWS = 2
# Rows of a buffer that are filled: the true ones and every row that a tile of 32 could touch. The
# rest of a full-size bucket (100 MB) would take longer to fill than all steps to run.
_FILLED_ROWS = 64
_NAN, _ZERO = 0xFF, 0x00  # bytes: 0xFF.. is a NaN in f32 and bf16
_RESULTS = ("y", "sum", "q_out", "k_out")


def check_program(program: "Program") -> None:
    """Run the check for every bucket. Raises RunError naming the first bad bucket and its op.

    Leaves the program without KV blocks: allocate them afterwards.
    """
    caches = CacheMemory.allocate(program.template, 2 + TRUE_ROWS)
    program.set_caches(caches)
    for bucket in program.plans:
        _BucketCheck(program, bucket, caches).run()
    program.set_caches(None)


class _BucketCheck:
    """One bucket of a program."""

    def __init__(self, program: "Program", bucket: Bucket, caches: CacheMemory) -> None:
        self._program = program
        self._bucket = bucket
        self._caches = caches
        self._inputs = small_step(bucket, program.groups)
        self._ranges = _filled_ranges(program, bucket)

    def run(self) -> None:
        poisoned, clean = self._outputs(_NAN), self._outputs(_ZERO)
        if np.isfinite(clean).all() and poisoned.tobytes() == clean.tobytes():
            return
        number = self._first_bad_step()
        step = self._program.template.steps[number]
        raise RunError(
            f"self-check of bucket {self._bucket.name} failed at step {number}, {step.op} (kernel "
            f"{step.kernel}): its true rows depend on padding, or aren't numbers: don't use this "
            f"program; compile it again, and if that doesn't help please report it"
        )

    def _outputs(self, fill: int, steps: int = -1) -> np.ndarray:
        for offset, size in self._ranges:
            ctypes.memset(self._program.arena.address + offset, fill, size)
        self._caches.fill(fill)
        self._program.run(self._bucket, self._inputs, steps)
        return self._program.logits(self._bucket, len(self._inputs.rows)).copy()

    def _first_bad_step(self) -> int:
        """Bisects: from the first bad step on, something that steps wrote is bad."""
        low, high = 0, len(self._program.template.steps) - 1
        while low < high:
            middle = (low + high) // 2
            if self._is_bad(middle):
                high = middle
            else:
                low = middle + 1
        return low

    def _is_bad(self, number: int) -> bool:
        """Whether the true rows that the last writing step up to `number` left are bad."""
        steps = self._program.template.steps
        while number > 0 and not _results(steps[number]):
            number -= 1
        states = []
        for fill in (_NAN, _ZERO):
            self._outputs(fill, number + 1)
            states.append([self._read(steps[number], ref) for ref in _results(steps[number])])
        pairs = zip(*states, strict=True)
        return any(not np.array_equal(a, b) or not np.isfinite(b).all() for a, b in pairs)

    def _read(self, step: Step, ref: Ref) -> np.ndarray:
        """The true rows of a result, as float32."""
        program = self._program
        counts = dict(zip(("tokens", "requests", "rows"), self._inputs.counts, strict=True))
        row_bytes = program.template.buffers[ref.index].row_bytes
        start = program.plans[self._bucket].offsets[ref.index]
        item = ITEM_SIZES[ref.dtype]
        raw = program.arena.bytes[start : start + counts[step.rows] * row_bytes]
        words = raw.view(np.uint16 if item == 2 else np.uint32).reshape(-1, row_bytes // item)
        columns = np.full((1,) * len(ref.shape), ref.offset // item)
        for axis, (size, stride) in enumerate(zip(ref.shape, ref.strides, strict=True)):
            shape = [1] * len(ref.shape)
            shape[axis] = size
            columns = columns + (np.arange(size) * stride).reshape(shape)
        found = words[:, columns.reshape(-1)].astype(np.uint32)
        return (found << 16 if item == 2 else found).view(np.float32)


def _results(step: Step) -> list[Ref]:
    return [step.operands[name] for name in _RESULTS if name in step.operands]


def small_step(bucket: Bucket, groups: int) -> StepInputs:
    """At most 2 true rows: two requests in a decode bucket, else one request with two tokens.

    Request r has block r + 1; every sequence starts at position 0.
    """
    tokens = min(TRUE_ROWS, bucket.tokens)
    requests = min(tokens, bucket.requests) if bucket.kind == "decode" else 1
    per_request = tokens // requests
    tokens = per_request * requests
    positions = np.tile(np.arange(per_request, dtype=np.int32), requests)
    blocks = np.repeat(np.arange(1, requests + 1, dtype=np.int32), per_request)
    table = np.arange(1, requests + 1, dtype=np.int32).reshape(requests, 1)
    return StepInputs(
        ids=np.arange(1, tokens + 1, dtype=np.int32) % 2,
        positions=positions,
        slots=[blocks * 32 + positions] * groups,
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

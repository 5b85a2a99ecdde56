"""A loaded plan: arena, caches, thread team and the native step arrays of its buckets.

Contract: plans are checked before anything native is made from them. `run` is one native call.
"""

import ctypes
import weakref
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ropeway.compiler.artifact.weights import WeightFile
from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import RunError
from ropeway.compiler.targets.cpu.cache_layout import plane_block_bytes
from ropeway.compiler.targets.cpu.plan import BucketPlan, Template
from ropeway.runtime.devices.base import Float32Array, Int32Array, StepInputs
from ropeway.runtime.devices.cpu import records
from ropeway.runtime.devices.cpu.library import chosen_isa, load_library
from ropeway.runtime.devices.cpu.memory import Region
from ropeway.runtime.devices.cpu.native import Team

_SLACK = 4096  # bytes after the arena that a kernel's prefetch may touch
_FAULTS = (
    "none",
    "counts",
    "ids",
    "positions",
    "rows",
    "query_start",
    "lengths",
    "slots",
    "block_table",
    "groups",
    "bucket",
    "no cache",
    "feed",
    "stopped",
    "no memory",
)
_COUNTS = ("tokens", "requests", "rows")


class CacheMemory:
    """KV blocks. Block b of all layers lies together, so memory is touched as blocks are used.

    Inside a block, each cache has its K plane and then its V plane.
    """

    def __init__(self, template: Template, blocks: int) -> None:
        """Zeroed blocks. Raises RunError when they don't fit."""
        self.blocks = blocks
        self.key_offsets: list[int] = []
        self.value_offsets: list[int] = []
        self.block_bytes = 0
        for slot in template.caches:
            self.key_offsets.append(self.block_bytes)
            self.block_bytes += plane_block_bytes(slot.heads, slot.key_dim, slot.dtype)
            self.value_offsets.append(self.block_bytes)
            self.block_bytes += plane_block_bytes(slot.heads, slot.value_dim, slot.dtype)
        self._region = Region(blocks * self.block_bytes, f"{blocks} KV blocks")
        self.address = self._region.address

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self._region.size

    def fill(self, pattern: bytes, blocks: Iterable[int] | None = None) -> None:
        """Fill `blocks` (None: all but the null block) with a pattern, for checks and tests."""
        for block in range(1, self.blocks) if blocks is None else blocks:
            self._region.fill(block * self.block_bytes, self.block_bytes, pattern)


class Program:
    """The native program of a template and its buckets."""

    def __init__(
        self,
        template: Template,
        plans: Mapping[Bucket, BucketPlan],
        weights: WeightFile,
        team: Team,
        isa: str | None = None,
        *,
        sparse: bool = False,
    ) -> None:
        """Bind every bucket. Template and plans are checked ones; `isa` forces a kernel set.

        A `sparse` program runs steps of a few rows only, in an arena of small pages.
        """
        self.template = template
        self.plans = plans
        self.team = team
        self.isa = chosen_isa(isa)
        self.groups = 1 + max((cache.group for cache in template.caches), default=-1)
        arena_bytes = max((plan.arena_bytes for plan in plans.values()), default=0)
        self.arena = Region(arena_bytes + _SLACK, "the arena", sparse=sparse)
        self._weights = weights
        self._library = load_library()
        self._caches: CacheMemory | None = None
        self._handle = self._create()
        self._free = weakref.finalize(self, self._library.rw_program_destroy, self._handle)
        self._numbers = {bucket: self._add(plan) for bucket, plan in plans.items()}
        self._logits_row = template.buffers[template.logits.index].row_bytes // 4
        self._report = records.RunReport()

    def _create(self) -> int:
        template = self.template
        row_bytes = (ctypes.c_int64 * len(template.buffers))(
            *(buffer.row_bytes for buffer in template.buffers)
        )
        spec = records.ProgramSpec(
            steps=records.pack_steps(template),
            weights=records.pack_weights(template, self._weights),
            caches=records.pack_caches(template),
            row_bytes=row_bytes,
            step_count=len(template.steps),
            weight_count=len(template.weights),
            cache_count=len(template.caches),
            buffer_count=len(template.buffers),
            max_length=template.max_length,
            groups=self.groups,
            head=head_step(template),
            arena=self.arena.address,
        )
        handle: int | None = self._library.rw_program_create(
            self.team.handle, ctypes.byref(spec), self.isa.encode()
        )
        if not handle:
            raise RunError("out of memory for the program: close other programs and load again")
        return handle

    def _add(self, plan: BucketPlan) -> int:
        bucket = plan.bucket
        offsets = (ctypes.c_int64 * len(plan.offsets))(*plan.offsets)
        number: int = self._library.rw_program_add_bucket(
            self._handle, bucket.tokens, bucket.requests, bucket.rows, offsets
        )
        if number < 0:
            raise RunError(
                f"out of memory for the scratch space of bucket {bucket.name}: compile with "
                f"smaller buckets"
            )
        return number

    def sparse_twin(self, plans: Mapping[Bucket, BucketPlan]) -> "Program":
        """A sparse program of the same template, weights, team and kernels, with other plans."""
        return Program(self.template, plans, self._weights, self.team, self.isa, sparse=True)

    def set_caches(self, caches: CacheMemory | None) -> None:
        """Use these KV blocks from the next step on; without any, no step runs."""
        self._caches = caches
        if caches is None:
            self._library.rw_program_set_caches(self._handle, None, None, None, 0, 0)
            return
        offsets = ctypes.c_int64 * len(self.template.caches)
        self._library.rw_program_set_caches(
            self._handle,
            caches.address,
            offsets(*caches.key_offsets),
            offsets(*caches.value_offsets),
            caches.blocks,
            caches.block_bytes,
        )

    @property
    def handle(self) -> int:
        """The native program."""
        return self._handle

    def number(self, bucket: Bucket) -> int:
        """The native number of a bucket, -1 for one that isn't there."""
        return self._numbers.get(bucket, -1)

    @property
    def caches(self) -> CacheMemory | None:
        """The KV blocks in use."""
        return self._caches

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks in every layer. Raises RunError for a block that isn't there."""
        packed = self.pack_copies(pairs)
        if pairs:
            self._library.rw_program_copy_blocks(self._handle, packed, len(pairs))

    def pack_copies(self, pairs: Sequence[tuple[int, int]]) -> "ctypes.Array[ctypes.c_int64]":
        """Pairs of blocks in native form. Raises RunError for a block that isn't there."""
        blocks = self._caches.blocks if self._caches else 0
        flat = [block for pair in pairs for block in pair]
        if any(not 0 <= block < blocks for block in flat):
            raise RunError(f"copy_blocks {list(pairs)}: there are blocks 0..{blocks - 1}")
        return (ctypes.c_int64 * len(flat))(*flat)

    def run(
        self,
        bucket: Bucket,
        inputs: StepInputs,
        steps: int = -1,
        stamps: "ctypes.Array[ctypes.c_int64] | None" = None,
    ) -> None:
        """Run the first `steps` plan steps (all when negative).

        `stamps` of len(steps) + 1 entries receives the start and each step's end in nanoseconds.
        Raises RunError naming the input that points outside the bucket, a table or the caches.
        """
        self.team.check_process()
        data, kept = step_data(inputs)
        number = self.number(bucket)
        self._library.rw_program_run(
            self._handle, number, ctypes.byref(data), steps, stamps, ctypes.byref(self._report)
        )
        del kept  # the arrays had to live until here
        if self._report.fault:
            raise step_fault(bucket, self._report)

    def run_together(self, jobs: Sequence[tuple[Bucket, StepInputs]], steps: int = -1) -> None:
        """Run several buckets, each plan step for all before the next: weights are read once.

        For the self-check; the buckets' plans mustn't share buffers. Raises RunError as `run` does.
        """
        self.team.check_process()
        packed = [step_data(inputs) for _, inputs in jobs]
        data = (records.StepData * len(jobs))(*(entry for entry, _ in packed))
        numbers = (ctypes.c_int32 * len(jobs))(*(self._numbers[bucket] for bucket, _ in jobs))
        self._library.rw_program_run_together(
            self._handle, numbers, data, len(jobs), steps, ctypes.byref(self._report)
        )
        del packed  # the arrays had to live until here
        if self._report.fault:
            raise step_fault(jobs[0][0], self._report)

    def logits(self, bucket: Bucket, rows: int) -> Float32Array:
        """The logits of the last step, [rows, V], as they lie in the arena."""
        ref = self.template.logits
        offset = self.plans[bucket].offsets[ref.index]
        matrix = self.arena.array(offset, (rows, self._logits_row))
        first = ref.offset // 4
        return matrix[:, first : first + ref.width]

    def peaks(self) -> records.Peaks:
        """The largest logit of each row of the last step that `run` ran, valid until the next."""
        found = records.Peaks()
        self._library.rw_program_peaks(self._handle, ctypes.byref(found))
        return found

    def close(self) -> None:
        """Free the native program; the arena and caches go with the last view of them."""
        self._free()
        self._caches = None


def head_step(template: Template) -> int:
    """The step whose GEMM writes the logits as they are sampled, or -1."""
    logits = template.logits
    number = max(
        (
            number
            for number, step in enumerate(template.steps)
            for ref in step.operands.values()
            if ref.space == "arena" and ref.index == logits.index
        ),
        default=-1,
    )
    if number < 0:
        return -1
    step = template.steps[number]
    y = step.operands.get("y")
    whole = y is not None and (y.index, y.offset, y.dtype, y.shape) == (
        logits.index,
        logits.offset,
        "f32",
        (logits.width,),
    )
    return number if step.kernel == "gemm" and whole and "add" not in step.operands else -1


def step_data(inputs: StepInputs) -> tuple[records.StepData, list[object]]:
    """The native form of the inputs, and what has to stay alive while it is used."""
    kept: list[object] = []

    def address(values: Int32Array) -> int:
        array = np.ascontiguousarray(values, np.int32)
        kept.append(array)
        found: int = array.ctypes.data
        return found

    tokens, requests, rows = inputs.counts
    _check_lengths(inputs, tokens, requests)
    peak_only = None
    if inputs.peak_only is not None:
        if inputs.peak_only.shape != (rows,):
            raise RunError(f"{rows} rows with peak_only of {inputs.peak_only.shape}")
        kept.append(mask := np.ascontiguousarray(inputs.peak_only, np.uint8))
        peak_only = mask.ctypes.data
    groups = len(inputs.slots)
    pointers = ctypes.c_void_p * groups
    data = records.StepData(
        tokens=tokens,
        requests=requests,
        rows=rows,
        ids=address(inputs.ids),
        positions=address(inputs.positions),
        row_index=address(inputs.rows),
        query_start=address(inputs.query_start),
        lengths=address(inputs.lengths),
        slots=pointers(*(address(slots) for slots in inputs.slots)),
        block_tables=pointers(*(address(table) for table in inputs.block_tables)),
        table_widths=(ctypes.c_int64 * groups)(*(t.shape[1] for t in inputs.block_tables)),
        groups=groups,
        peak_only=peak_only,
    )
    return data, kept


def _check_lengths(inputs: StepInputs, tokens: int, requests: int) -> None:
    """Array lengths, which the native side can't see."""
    per_token = [inputs.positions, *inputs.slots]
    if any(array.shape != (tokens,) for array in per_token):
        raise RunError(f"{tokens} ids with positions and slots of {[a.shape for a in per_token]}")
    if inputs.query_start.shape != (requests + 1,) or inputs.ids.ndim != 1 or inputs.rows.ndim != 1:
        raise RunError(f"{requests} lengths with query_start of {inputs.query_start.shape}")
    tables = [table.shape for table in inputs.block_tables]
    if len(tables) != len(inputs.slots) or any(
        len(shape) != 2 or shape[0] != requests for shape in tables
    ):
        raise RunError(f"{requests} requests in {len(inputs.slots)} groups with tables of {tables}")


def step_fault(bucket: Bucket, report: records.RunReport) -> RunError:
    """Why a step was refused."""
    name = _FAULTS[report.fault]
    if name == "no cache":
        return RunError("the KV blocks aren't allocated: call allocate() first")
    if name == "bucket":
        return RunError(f"no bucket {bucket.name} in this program")
    if name == "no memory":
        return RunError("out of memory while sampling: lower max_num_seqs or kv_cache_memory")
    if name == "stopped":
        return RunError("the step was stopped before it began, or the one before it failed")
    if name == "counts":
        what = _COUNTS[report.where]
        return RunError(
            f"{report.value} {what} in bucket {bucket.name}, which takes {report.limit}"
        )
    return RunError(
        f"step input {name}[{report.where}] of cache group {report.group} is {report.value}, "
        f"outside 0..{report.limit}: a fault of the scheduler, please report it"
    )

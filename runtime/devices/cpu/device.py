"""The CPU device: plans replayed by the native executor, weights read where they are mapped."""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import ArtifactError, RunError
from ropeway.compiler.targets.cpu.cache_layout import group_plans
from ropeway.compiler.targets.cpu.plan import (
    TEMPLATE_FILE,
    BucketPlan,
    Template,
    decode_bucket,
    decode_template,
)
from ropeway.compiler.targets.cpu.plan_checks import check_bucket, check_template
from ropeway.runtime.cores import usable_cores
from ropeway.runtime.devices.base import (
    CacheLayout,
    DeviceMemory,
    Handle,
    StepInputs,
    StepTiming,
    UInt8Array,
)
from ropeway.runtime.devices.cpu.library import load_library
from ropeway.runtime.devices.cpu.memory import available_bytes
from ropeway.runtime.devices.cpu.native import Team
from ropeway.runtime.devices.cpu.program import CacheMemory, Program
from ropeway.runtime.devices.cpu.queue import NativeQueue
from ropeway.runtime.sampling.native import NativeSampler, RowPeaks
from ropeway.runtime.selfcheck import check_program

if TYPE_CHECKING:
    from ropeway.compiler.artifact import Artifact
    from ropeway.runtime.sampling.batch import SampleBatch, SampleResult


class CpuDevice:
    """See `ropeway.runtime.devices.base.Device`. submit returns when the step is done; what is to
    run behind the caller's back goes through the queue."""

    name = "cpu"

    def __init__(self, isa: str | None = None) -> None:
        """`isa` forces an instruction set, as $ROPEWAY_ISA does."""
        self._isa = isa
        self._program: Program | None = None
        self._team: Team | None = None
        self._sampler: NativeSampler | None = None
        self._queue: NativeQueue | None = None
        self._weight_bytes = 0
        self._steps = 0
        self._peak_only: UInt8Array | None = None  # of the last step

    def load(self, artifact: "Artifact", num_threads: int | None = None) -> None:
        """See Device.load. Every bucket is checked, bound and run once."""
        template, plans = read_plans(artifact)
        self._team = Team(num_threads or usable_cores())
        self._program = Program(template, plans, artifact.weights, self._team, self._isa)
        self._weight_bytes = int(artifact.weights.data.nbytes)
        self._sampler = NativeSampler(load_library(), template.logits.width)
        check_program(self._program)

    @property
    def loaded(self) -> Program:
        """The loaded program. Raises RunError before load and after close."""
        if self._program is None:
            raise RunError("the device holds no program: load() one first")
        return self._program

    @property
    def isa(self) -> str:
        """The instruction set of the kernels in use."""
        return self.loaded.isa

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Every bucket of the loaded program."""
        return list(self.loaded.plans)

    @property
    def cache_layout(self) -> CacheLayout:
        """32 tokens a block."""
        program = self.loaded
        plans = group_plans(program.template.caches)
        return CacheLayout(
            block_size=program.template.block_size,
            block_bytes=sum(plan.bytes_per_block for plan in plans),
            groups=program.groups,
        )

    def allocate(self, num_blocks: int) -> None:
        """See Device.allocate. Memory is taken as blocks are first written."""
        if num_blocks < 1:
            raise RunError(f"{num_blocks} KV blocks: at least the null block is needed")
        self._settle()
        self.loaded.set_caches(CacheMemory(self.loaded.template, num_blocks))

    def prepare(self, bucket: Bucket) -> None:
        """Buckets are bound at load; a bucket that isn't there is refused."""
        if bucket not in self.loaded.plans:
            raise RunError(f"no bucket {bucket.name} in this program")

    def submit(self, bucket: Bucket, inputs: StepInputs) -> Handle:
        """See Device.submit."""
        program = self.loaded
        self._settle()
        program.run(bucket, inputs)
        self._steps += 1
        self._peak_only = inputs.peak_only
        return Handle(self._steps, bucket, program.logits(bucket, len(inputs.rows)))

    def sample(self, handle: Handle, batch: "SampleBatch") -> "SampleResult":
        """See Device.sample: rows are shared out over the team."""
        if handle.number != self._steps:
            raise RunError(f"step {handle.number}'s logits are gone: {self._steps} ran since")
        if self._sampler is None or self._team is None:
            raise RunError("the device holds no program: load() one first")
        team = self._team
        task = ctypes.cast(load_library().ropeway_sample_rows, ctypes.c_void_p).value or 0
        found = self.loaded.peaks()
        peaks = None
        if found.parts:
            peaks = RowPeaks(found.parts, found.count, found.rows, self._peak_only)
        return self._sampler.sample(
            handle.logits, batch, lambda args: team.run(task, args), peaks=peaks
        )

    def wait(self, handle: Handle) -> None:
        """Steps are done when submit returns."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Device.copy_blocks."""
        self._settle()
        self.loaded.copy_blocks(pairs)

    def open_queue(self) -> NativeQueue:
        """See Device.open_queue."""
        if self._sampler is None or self._team is None:
            raise RunError("the device holds no program: load() one first")
        if self._queue is not None:
            raise RunError("the device has a queue already: it holds one")
        self._queue = NativeQueue(self.loaded, self._team, self._sampler)
        return self._queue

    def _settle(self) -> None:
        """The program and its threads are the queue's while a step is in flight."""
        if self._queue is not None:
            self._queue.drain()

    def memory(self) -> DeviceMemory:
        """What the device holds now."""
        program = self._program
        caches = program.caches if program else None
        return DeviceMemory(
            weights=self._weight_bytes,
            arena=program.arena.size if program else 0,
            cache=caches.size if caches else 0,
            available=available_bytes(),
        )

    def profile(self, bucket: Bucket, inputs: StepInputs, runs: int) -> list[StepTiming]:
        """See Device.profile; the KV of the step is written again by every run."""
        program = self.loaded
        self._settle()
        steps = program.template.steps
        stamps = (ctypes.c_int64 * (len(steps) + 1))()
        totals = [0] * len(steps)
        for _ in range(runs):
            program.run(bucket, inputs, stamps=stamps)
            for number in range(len(steps)):
                totals[number] += stamps[number + 1] - stamps[number]
        return [
            StepTiming(step.op, step.kernel, total)
            for step, total in zip(steps, totals, strict=True)
        ]

    def close(self) -> None:
        """See Device.close."""
        if self._queue is not None:
            self._queue.close()
        if self._sampler is not None:
            self._sampler.close()
        if self._program is not None:
            self._program.close()
        if self._team is not None:
            self._team.close()
        self._program = self._team = self._sampler = self._queue = None


def read_plans(artifact: "Artifact") -> tuple[Template, dict[Bucket, BucketPlan]]:
    """The artifact's plans, every bound checked. Raises ArtifactError naming the file."""
    template = decode_template(artifact.read(TEMPLATE_FILE), f"{artifact.path}/{TEMPLATE_FILE}")
    check_template(template, f"{artifact.path}/{TEMPLATE_FILE}")
    _check_manifest(artifact, template)
    plans: dict[Bucket, BucketPlan] = {}
    graphs = artifact.function.graphs
    for bucket in artifact.manifest.buckets:
        file = graphs.get(bucket.name)
        if file is None:
            raise ArtifactError(
                f"{artifact.path}: no plan for bucket {bucket.name}: compile the model again"
            )
        where = f"{artifact.path}/{file}"
        plan = decode_bucket(artifact.read(file), where)
        check_bucket(template, plan, bucket, where)
        plans[bucket] = plan
    return template, plans


def _check_manifest(artifact: "Artifact", template: Template) -> None:
    """The engine sizes requests and samples by the manifest, the plan runs by the template."""
    model = artifact.manifest.model
    for name, said, is_so in (
        ("vocab_size", model.vocab_size, model.vocab_size == template.logits.width),
        ("max_model_len", model.max_model_len, 1 <= model.max_model_len <= template.max_length),
    ):
        if not is_so:
            raise ArtifactError(
                f"{artifact.path}/manifest.json: {name} is {said}, but {TEMPLATE_FILE} computes "
                f"{template.logits.width} logits for up to {template.max_length} tokens: "
                f"compile the model again"
            )

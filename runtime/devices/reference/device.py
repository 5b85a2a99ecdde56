"""The reference device: the artifact's IR, interpreted with torch behind the Device interface.

Slow and simple, so that the engine can be tested against it and every model runs somewhere. It
needs torch (`ropeway[compile]`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import ArtifactError, MissingExtraError, RunError
from ropeway.runtime.devices.base import (
    CacheLayout,
    DeviceMemory,
    Handle,
    StepInputs,
    StepQueue,
    StepTiming,
)
from ropeway.runtime.devices.cpu.memory import available_bytes
from ropeway.runtime.sampling.numpy_sampler import NumpySampler

try:
    import torch
except ImportError as error:
    raise MissingExtraError("target reference", "torch", "compile") from error

from ropeway.compiler.ir.graph import Module
from ropeway.compiler.ir.types import CacheType, DType, TensorType
from ropeway.compiler.ops.interpreter import Interpreter
from ropeway.compiler.ops.text import read_module

if TYPE_CHECKING:
    from ropeway.compiler.artifact import Artifact, WeightFile
    from ropeway.runtime.sampling.batch import SampleBatch, SampleResult

_TORCH = {DType.F32: torch.float32, DType.BF16: torch.bfloat16}
_STORED = {"f32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32, "i64": torch.int64}


class ReferenceDevice:
    """See `ropeway.runtime.devices.base.Device`. Buckets are only bounds: true sizes are run."""

    name = "reference"

    def __init__(self) -> None:
        self._module: Module | None = None
        self._interpreter: Interpreter | None = None
        self._sampler: NumpySampler | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._layout = CacheLayout(1, 0, 0)
        self._caches: dict[str, dict[str, torch.Tensor]] = {}
        self._blocks = 0
        self._weight_bytes = 0
        self._steps = 0

    def load(self, artifact: "Artifact", num_threads: int | None = None) -> None:
        """See Device.load. `num_threads` bounds torch's own threads, for the whole process."""
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        module = read_module(artifact.read(artifact.function.ir).decode())
        logits = module.fn.output("logits")
        if logits is None or not isinstance(logits.type, TensorType):
            raise ArtifactError(f"{artifact.path}: the function returns no logits: compile again")
        if logits.type.shape[-1] != artifact.manifest.model.vocab_size:
            raise ArtifactError(
                f"{artifact.path}/manifest.json: vocab_size is "
                f"{artifact.manifest.model.vocab_size}, the function's logits are {logits.type}: "
                f"compile the model again"
            )
        self._module = module
        self._interpreter = Interpreter(module, _StoredWeights(artifact.weights))
        self._sampler = NumpySampler(int(logits.type.shape[-1]))
        self._buckets = artifact.manifest.buckets
        self._weight_bytes = int(artifact.weights.data.nbytes)
        groups = artifact.manifest.cache_groups
        self._layout = CacheLayout(
            block_size=groups[0].block_size if groups else 1,
            block_bytes=sum(group.bytes_per_block for group in groups),
            groups=len(groups),
        )

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Every bucket of the loaded program."""
        return self._buckets

    @property
    def cache_layout(self) -> CacheLayout:
        """How KV is kept: unpadded planes."""
        return self._layout

    def allocate(self, num_blocks: int) -> None:
        """See Device.allocate."""
        if num_blocks < 1:
            raise RunError(f"{num_blocks} KV blocks: at least the null block is needed")
        size = self._layout.block_size
        self._caches = {
            entry.value.name: {
                plane.name: torch.zeros((num_blocks, size, *plane.shape), dtype=_TORCH[plane.dtype])
                for plane in entry.value.type.planes
            }
            for entry in self._loaded.fn.inputs
            if isinstance(entry.value.type, CacheType)
        }
        self._blocks = num_blocks

    @property
    def _loaded(self) -> Module:
        if self._module is None:
            raise RunError("the device holds no program: load() one first")
        return self._module

    def prepare(self, bucket: Bucket) -> None:
        """Nothing to prepare; a bucket that isn't there is refused."""
        if bucket not in self._buckets:
            raise RunError(f"no bucket {bucket.name} in this program")

    def submit(self, bucket: Bucket, inputs: StepInputs) -> Handle:
        """See Device.submit."""
        module = self._loaded
        self.prepare(bucket)
        self._check(bucket, inputs)
        if self._interpreter is None:
            raise RunError("the device holds no program: load() one first")
        feeds = _feeds(inputs)
        wanted = {entry.role for entry in module.fn.inputs}
        given = {role: values for role, values in feeds.items() if role in wanted}
        with torch.inference_mode():
            outputs = self._interpreter.run(module.fn, given, self._caches)
        self._steps += 1
        return Handle(self._steps, bucket, outputs["logits"].float().numpy())

    def _check(self, bucket: Bucket, inputs: StepInputs) -> None:
        """Sizes and block numbers; what the CPU device checks natively."""
        tokens, requests, rows = inputs.counts
        limits = (bucket.tokens, bucket.requests, bucket.rows)
        for what, count, limit in zip(
            ("tokens", "requests", "rows"), (tokens, requests, rows), limits, strict=True
        ):
            if count > limit:
                raise RunError(f"{count} {what} in bucket {bucket.name}, which takes {limit}")
        if self._layout.groups and not self._blocks:
            raise RunError("the KV blocks aren't allocated: call allocate() first")
        bound = self._blocks * self._layout.block_size
        for slots, tables in zip(inputs.slots, inputs.block_tables, strict=True):
            if slots.size and not (slots.min() >= -1 and slots.max() < bound):
                raise RunError(f"a slot is outside 0..{bound}: a fault of the scheduler")
            if tables.size and not (tables.min() >= 0 and tables.max() < self._blocks):
                raise RunError(f"a block is outside 0..{self._blocks}: a fault of the scheduler")

    def sample(self, handle: Handle, batch: "SampleBatch") -> "SampleResult":
        """See Device.sample."""
        if self._sampler is None:
            raise RunError("the device holds no program: load() one first")
        return self._sampler.sample(handle.logits, batch)

    def wait(self, handle: Handle) -> None:
        """Steps are done when submit returns."""

    def open_queue(self) -> StepQueue | None:
        """Steps are interpreted in the caller's own thread."""
        return None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Device.copy_blocks."""
        for source, destination in pairs:
            if not (0 <= source < self._blocks and 0 <= destination < self._blocks):
                raise RunError(f"copy_blocks {list(pairs)}: there are blocks 0..{self._blocks - 1}")
            for planes in self._caches.values():
                for plane in planes.values():
                    plane[destination] = plane[source]

    def memory(self) -> DeviceMemory:
        """What the device holds now."""
        cache = sum(plane.nbytes for planes in self._caches.values() for plane in planes.values())
        return DeviceMemory(self._weight_bytes, 0, cache, available_bytes())

    def profile(self, bucket: Bucket, inputs: StepInputs, runs: int) -> list[StepTiming]:
        """The interpreter isn't worth profiling."""
        return []

    def close(self) -> None:
        """See Device.close."""
        self._module = self._interpreter = self._sampler = None
        self._caches = {}


def _feeds(inputs: StepInputs) -> dict[str, torch.Tensor]:
    """Step inputs by role."""
    arrays: dict[str, np.ndarray] = {
        "ids": inputs.ids,
        "positions": inputs.positions,
        "rows": inputs.rows,
        "query_start": inputs.query_start,
        "lengths": inputs.lengths,
    }
    arrays |= {f"slots.{group}": slots for group, slots in enumerate(inputs.slots)}
    arrays |= {f"block_table.{group}": table for group, table in enumerate(inputs.block_tables)}
    return {
        role: torch.from_numpy(np.array(values, dtype=np.int32)) for role, values in arrays.items()
    }


class _StoredWeights(Mapping[str, torch.Tensor]):
    """An artifact's weights by name, each copied when first read."""

    def __init__(self, file: "WeightFile") -> None:
        self._file = file
        self._made: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._made:
            stored = self._file.tensors[name]
            view = self._file.data[stored.offset : stored.offset + stored.nbytes]
            # A copy: torch would warn about memory that it mustn't write.
            held = torch.from_numpy(view.copy()).view(_STORED[stored.dtype])
            self._made[name] = held.reshape(stored.shape)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.tensors)

    def __len__(self) -> int:
        return len(self._file.tensors)

"""From a lowered module to what an artifact holds: manifest, files, weights that load lazily.

Weights are expressions until the artifact is written; then each is evaluated, packed, written and
let go, so that compiling needs memory for one weight at a time beside the checkpoint's mapping.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import cast

import numpy as np
import numpy.typing as npt

from ropeway.compiler.artifact.manifest import (
    FORMAT,
    KIND,
    CacheGroup,
    CacheInput,
    FunctionSpec,
    Manifest,
    ModelInfo,
    Numerics,
    NumericsClass,
    PlaneSpec,
    RankSpec,
    TensorInput,
)
from ropeway.compiler.artifact.reports import (
    MEMORY_FILE,
    PASSES_FILE,
    BucketReport,
    MemoryReport,
)
from ropeway.compiler.artifact.weights import WeightEntry
from ropeway.compiler.artifact.writer import ArtifactContents
from ropeway.compiler.driver.options import CompileOptions
from ropeway.compiler.ir.dims import print_dim
from ropeway.compiler.ir.fingerprint import fingerprint
from ropeway.compiler.ir.graph import Function, Module, Op, Value
from ropeway.compiler.ir.printer import print_module
from ropeway.compiler.ir.types import CacheType, TensorType
from ropeway.compiler.ir.weights import Apply, Ckpt, Weight, leaves
from ropeway.compiler.ops.tensors import TensorSource
from ropeway.compiler.ops.weight_functions import evaluate
from ropeway.compiler.ops.weight_types import packed_shape
from ropeway.compiler.pipeline.report import Report
from ropeway.compiler.targets.base import Payload
from ropeway.compiler.version import VERSION

IR_FILE = "ir/step.ir"
WEIGHTS_FILE = "weights/model.safetensors"


@dataclass(frozen=True)
class Origin:
    """Where a module came from: tensors, and the names that users know."""

    source: TensorSource
    constants: TensorSource
    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    command: str
    tokenizer_files: Mapping[str, bytes]


def build_contents(
    module: Module, payload: Payload, report: Report, options: CompileOptions, origin: Origin
) -> ArtifactContents:
    """Everything that goes into the artifact of a lowered module."""
    entries = [_entry(weight, origin) for weight in used_weights(module.fn)]
    memory = MemoryReport(
        weight_bytes=sum(entry.nbytes for entry in entries),
        buckets=tuple(
            BucketReport(item.bucket, item.arena_bytes, item.buffers, item.without_reuse_bytes)
            for item in payload.memory
        ),
    )
    files = {
        IR_FILE: print_module(module).encode(),
        PASSES_FILE: report.to_json(),
        MEMORY_FILE: memory.to_json(),
        **payload.files,
        **dict(payload.graphs.values()),
    }
    files |= {f"tokenizer/{name}": data for name, data in origin.tokenizer_files.items()}
    manifest = Manifest(
        kind=KIND,
        format=FORMAT,
        producer=VERSION,
        command=origin.command,
        target=options.target,
        dtype=options.dtype,
        model=ModelInfo(
            name=origin.name,
            architecture=origin.architecture,
            vocab_size=origin.vocab_size,
            max_model_len=origin.max_model_len,
            parameters=_count_parameters(module),
        ),
        max_num_batched_tokens=options.max_num_batched_tokens,
        functions=(_function_spec(module, payload),),
        ranks=(RankSpec(0, WEIGHTS_FILE),),
        cache_groups=_cache_groups(module.fn, payload),
        buckets=options.buckets,
        numerics=Numerics(activations=options.dtype, passes=weakest(report)),
        files={},
    )
    return ArtifactContents(manifest, files, {WEIGHTS_FILE: entries})


def used_weights(function: Function) -> list[Weight]:
    """The weights that ops use, once each, in order of first use: so a step reads them in order."""
    seen: dict[str, Weight] = {}
    for op in function.ops:
        for _, operand in op.operands():
            if isinstance(operand, Weight):
                seen.setdefault(operand.name, operand)
    return list(seen.values())


def weakest(report: Report) -> NumericsClass:
    """The weakest numerics class among the passes that changed something."""
    order: tuple[NumericsClass, ...] = ("exact", "reorder", "lossy")
    ran = {entry.numerics for entry in report.passes if entry.matches}
    return max((name for name in order if name in ran), key=order.index, default=order[0])


def _entry(weight: Weight, origin: Origin) -> WeightEntry:
    shape = cast(tuple[int, ...], weight.type.shape)
    expr = weight.expr
    if isinstance(expr, Apply) and expr.fn == "pack":
        shape = packed_shape(str(expr.attr["layout"]), weight.type)

    def load() -> npt.NDArray[np.uint8]:
        import torch  # noqa: PLC0415  # explaining a program needs no torch

        tensor = evaluate(expr, origin.source, origin.constants).contiguous()
        return tensor.reshape(-1).view(torch.uint8).numpy()

    return WeightEntry(weight.name, weight.type.dtype.value, shape, load)


def _count_parameters(module: Module) -> int:
    """Elements of the weights that the checkpoint gives: not of rope tables and the like."""
    return sum(
        prod(cast(tuple[int, ...], weight.type.shape))
        for weight in used_weights(module.fn)
        if any(isinstance(leaf, Ckpt) for leaf in leaves(weight.expr))
    )


def _function_spec(module: Module, payload: Payload) -> FunctionSpec:
    function = module.fn
    tensors = []
    caches = []
    layers: dict[int, int] = {}
    for entry in function.inputs:
        kind = entry.value.type
        if isinstance(kind, CacheType):
            layer = layers.get(kind.group, 0)
            layers[kind.group] = layer + 1
            caches.append(CacheInput(entry.value.name, kind.group, layer))
        else:
            tensors.append(_tensor(entry.value.name, entry.role, kind))
    return FunctionSpec(
        name=function.name,
        ir=IR_FILE,
        fingerprint=fingerprint(module),
        inputs=tuple(tensors),
        caches=tuple(caches),
        outputs=tuple(
            _tensor(value.name, role, cast(TensorType, value.type))
            for value, role in function.outputs
        ),
        graphs={bucket.name: path for bucket, (path, _) in payload.graphs.items()},
    )


def _tensor(name: str, role: str, kind: TensorType) -> TensorInput:
    shape = tuple(dim if isinstance(dim, int) else print_dim(dim) for dim in kind.shape)
    return TensorInput(name, role, kind.dtype.value, shape)


def _cache_groups(function: Function, payload: Payload) -> tuple[CacheGroup, ...]:
    types = {
        entry.value.type.group: entry.value.type
        for entry in function.inputs
        if isinstance(entry.value.type, CacheType)
    }
    return tuple(
        CacheGroup(
            group=plan.group,
            layers=plan.layers,
            planes=tuple(
                PlaneSpec(plane.name, plane.dtype.value, plane.shape)
                for plane in types[plan.group].planes
            ),
            block_size=plan.block_size,
            bytes_per_block=plan.bytes_per_block,
            window=_window(function.ops, plan.group),
        )
        for plan in payload.cache_groups
    )


def _window(ops: Iterable[Op], group: int) -> int:
    """The sliding window that every attention of a group has; 0 when one of them sees all."""
    windows = {
        int(cast(int, op.attrs.get("window", 0)))
        for op in ops
        for _, operand in op.operands()
        if isinstance(operand, Value)
        and isinstance(operand.type, CacheType)
        and operand.type.group == group
    }
    return 0 if 0 in windows else max(windows, default=0)

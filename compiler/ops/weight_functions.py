"""Evaluates weight expressions with torch, one weight at a time.

`evaluate` gives the tensor to store (packed if the expression says so); `evaluate_logical` the one
that ops mean, for the interpreter. Peak memory is one weight, its arguments and its result.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch

from ropeway.compiler.errors import CheckpointError, InputError
from ropeway.compiler.ir.graph import Module
from ropeway.compiler.ir.types import DType, TensorType
from ropeway.compiler.ir.weights import Apply, Ckpt, Weight, WeightExpr
from ropeway.compiler.ops.tensors import TensorSource
from ropeway.compiler.ops.weight_types import check_expr, filled_attrs, infer_type, packed_shape

__all__ = [
    "TORCH_DTYPES",
    "MappedTensors",
    "NoTensors",
    "evaluate",
    "evaluate_logical",
    "infer_type",
    "pack",
    "stream_weights",
    "unpack",
]

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.F32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
    DType.BOOL: torch.bool,
}


class NoTensors:
    """An empty TensorSource."""

    def names(self) -> list[str]:
        """No names."""
        return []

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Always raises CheckpointError."""
        raise CheckpointError(f"tensor {name!r} isn't there: no tensors were given")

    def get(self, name: str) -> torch.Tensor:
        """Always raises CheckpointError."""
        raise CheckpointError(f"tensor {name!r} isn't there: no tensors were given")


class MappedTensors:
    """A TensorSource over tensors in memory: constants, or a module's parameters."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> list[str]:
        """The names, in the mapping's order."""
        return list(self._tensors)

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape); raises CheckpointError for an unknown name."""
        tensor = self.get(name)
        names = {torch_dtype: dtype.value for dtype, torch_dtype in TORCH_DTYPES.items()}
        known = names.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        return known, tuple(tensor.shape)

    def get(self, name: str) -> torch.Tensor:
        """The tensor; raises CheckpointError for an unknown name."""
        if name not in self._tensors:
            raise CheckpointError(f"tensor {name!r} isn't among the {len(self._tensors)} given")
        return self._tensors[name]


def evaluate(
    expr: WeightExpr, source: TensorSource, constants: TensorSource | None = None
) -> torch.Tensor:
    """The tensor as it is stored: contiguous, packed if the expression's root is `pack`.

    Raises VerifyError for a broken expression and CheckpointError for a missing tensor.
    """
    check_expr(expr)
    return _evaluate(expr, source, constants or NoTensors()).contiguous()


def evaluate_logical(
    expr: WeightExpr, source: TensorSource, constants: TensorSource | None = None
) -> torch.Tensor:
    """The tensor as ops see it, whatever its packing."""
    if isinstance(expr, Apply) and expr.fn == "pack" and len(expr.args) == 1:
        expr = expr.args[0]
    return evaluate(expr, source, constants)


def stream_weights(
    module: Module, source: TensorSource, constants: TensorSource | None = None
) -> Iterator[tuple[Weight, torch.Tensor]]:
    """(weight, stored tensor) of every weight, in the module's order, one at a time.

    Raises InputError when a tensor's logical shape or dtype isn't the declared one.
    """
    for weight in module.weights.values():
        tensor = evaluate(weight.expr, source, constants)
        check_stored(weight, tensor)
        yield weight, tensor


def check_stored(weight: Weight, tensor: torch.Tensor) -> None:
    """Raises InputError unless a stored tensor fits the weight's type and packing."""
    shape: tuple[object, ...] = weight.type.shape
    expr = weight.expr
    if isinstance(expr, Apply) and expr.fn == "pack":
        shape = packed_shape(str(expr.attr["layout"]), weight.type)
    if tuple(tensor.shape) != shape or tensor.dtype != TORCH_DTYPES[weight.type.dtype]:
        raise InputError(
            f"weight @{weight.name} should be {weight.type.dtype.value}{list(shape)}, and its "
            f"expression gave {tensor.dtype} {list(tensor.shape)}: the checkpoint doesn't fit"
        )


def pack(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A logical [N, K] tensor in a kernel layout, zero padded (see `packed_shape`)."""
    names = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
    kind = TensorType(names[tensor.dtype], tuple(tensor.shape))
    shape = packed_shape(layout, kind)
    if layout == "panel32_gated":
        tensor = tensor.reshape(2, -1, 16, tensor.shape[1]).transpose(0, 1).flatten(0, 2)
    rows, width = tensor.shape
    panels, padded = shape[0], -(-width // 32) * 32
    full = tensor
    if (rows, width) != (panels * 32, padded):
        full = torch.zeros(panels * 32, padded, dtype=tensor.dtype)
        full[:rows, :width] = tensor
    if kind.dtype == DType.F32:
        return full.reshape(panels, 32, padded).permute(0, 2, 1).contiguous()
    return full.reshape(panels, 32, padded // 2, 2).permute(0, 2, 1, 3).contiguous()


def unpack(tensor: torch.Tensor, layout: str, shape: tuple[int, int]) -> torch.Tensor:
    """The logical [N, K] tensor of a packed one. Raises InputError when the shape isn't its."""
    names = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
    expected = packed_shape(layout, TensorType(names[tensor.dtype], shape))
    if tuple(tensor.shape) != expected:
        raise InputError(
            f"a packed tensor of shape {tuple(tensor.shape)} isn't {layout} of {shape}: "
            f"that is {expected}"
        )
    order = (0, 2, 1) if tensor.dim() == 3 else (0, 2, 1, 3)
    full = tensor.permute(order).reshape(tensor.shape[0] * 32, -1)
    if layout == "panel32_gated":
        full = full.reshape(-1, 2, 16, full.shape[1]).transpose(0, 1).flatten(0, 2)
    return full[: shape[0], : shape[1]].contiguous()


def _evaluate(expr: WeightExpr, source: TensorSource, constants: TensorSource) -> torch.Tensor:
    if not isinstance(expr, Apply):
        return (source if isinstance(expr, Ckpt) else constants).get(expr.name)
    args = [_evaluate(arg, source, constants) for arg in expr.args]
    try:
        return _MEANINGS[expr.fn](args, cast(Mapping[str, object], filled_attrs(expr)))
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(str(list(arg.shape)) for arg in args)
        first = str(error).splitlines()[0]
        raise InputError(
            f"weight function {expr.fn} doesn't fit the shapes {shapes} ({first}): "
            f"the checkpoint isn't the one the program was made for"
        ) from error


_Meaning = Callable[[list[torch.Tensor], Mapping[str, object]], torch.Tensor]


def _size(attrs: Mapping[str, object], key: str) -> int:
    return cast(int, attrs[key])


def _sizes(attrs: Mapping[str, object], key: str) -> tuple[int, ...]:
    return cast(tuple[int, ...], attrs[key])


def _transpose(args: list[torch.Tensor], attrs: Mapping[str, object]) -> torch.Tensor:
    perm = attrs.get("perm", tuple(reversed(range(args[0].dim()))))
    return args[0].permute(cast(tuple[int, ...], perm))


def _slice(args: list[torch.Tensor], attrs: Mapping[str, object]) -> torch.Tensor:
    axis, start, stop = (_size(attrs, key) for key in ("axis", "start", "stop"))
    return args[0].narrow(axis, start, stop - start)


def _rounded(
    compute: Callable[[list[torch.Tensor], Mapping[str, object]], torch.Tensor],
) -> _Meaning:
    """Arithmetic in float32, rounded once to the first argument's dtype."""

    def meaning(args: list[torch.Tensor], attrs: Mapping[str, object]) -> torch.Tensor:
        return compute([arg.float() for arg in args], attrs).to(args[0].dtype)

    return meaning


_MEANINGS: dict[str, _Meaning] = {
    "concat": lambda args, attrs: torch.cat(args, dim=_size(attrs, "axis")),
    "cast": lambda args, attrs: args[0].to(TORCH_DTYPES[DType(cast(str, attrs["dtype"]))]),
    "transpose": _transpose,
    "reshape": lambda args, attrs: args[0].reshape(_sizes(attrs, "shape")),
    "expand": lambda args, attrs: args[0].expand(_sizes(attrs, "shape")),
    "slice": _slice,
    "add_scalar": _rounded(lambda args, attrs: args[0] + cast(float, attrs["scalar"])),
    "mul_scalar": _rounded(lambda args, attrs: args[0] * cast(float, attrs["scalar"])),
    "add": _rounded(lambda args, attrs: args[0] + args[1]),
    "mul": _rounded(lambda args, attrs: args[0] * args[1]),
    "pack": lambda args, attrs: pack(args[0], cast(str, attrs["layout"])),
}

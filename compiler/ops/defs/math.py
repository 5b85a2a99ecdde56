"""Arithmetic: broadcasting binary ops, unary ops and reductions."""

from collections.abc import Sequence
from typing import TypeAlias

from ropeway.compiler.ir.dims import Dim, free_symbols, product, same
from ropeway.compiler.ir.types import TensorType, Type
from ropeway.compiler.ops.definition import AttrSpec, Cost, OpDef, OpView, traffic

Shape: TypeAlias = tuple[Dim, ...]


def broadcast(view: OpView, a: Shape, b: Shape) -> Shape:
    """The numpy broadcast of two shapes; fails on unequal sizes of which none is 1."""
    rank = max(len(a), len(b))
    padded_a = (1,) * (rank - len(a)) + a
    padded_b = (1,) * (rank - len(b)) + b
    shape: list[Dim] = []
    for left, right in zip(padded_a, padded_b, strict=True):
        if not (same(left, right) or same(left, 1) or same(right, 1)):
            view.fail(f"sizes {left} and {right} don't broadcast")
        shape.append(right if same(left, 1) else left)
    return tuple(shape)


def _infer_binary(view: OpView) -> list[Type]:
    operands = view.tensors()
    has_scalar = "scalar" in view.attrs
    if len(operands) + has_scalar != 2:
        view.fail("takes two tensors, or one tensor and a scalar attribute")
    x = operands[0]
    if has_scalar:
        if isinstance(view.attrs["scalar"], float) and not x.dtype.is_float:
            view.fail(f"the scalar of {x} should be an int")
        return [x]
    y = operands[1]
    view.check_dtype("the second operand", y, x.dtype)
    return [TensorType(x.dtype, broadcast(view, x.shape, y.shape))]


def _binary_rowwise(view: OpView) -> bool:
    """A lower-rank operand must hold no rows: its axes meet the trailing ones."""
    operands = view.tensors()
    rank = max(kind.rank for kind in operands)
    if rank == 0:
        return False
    low = [kind for kind in operands if kind.rank < rank]
    return not any(free_symbols(dim) for kind in low for dim in kind.shape)


def _infer_unary(view: OpView) -> list[Type]:
    return [view.floating("x")]


def _infer_abs(view: OpView) -> list[Type]:
    return [view.tensor("x")]


def _reduced_axes(view: OpView, rank: int) -> list[int]:
    axes = [view.axis(axis, rank) for axis in view.dims_attr("axes")]
    if not axes or len(set(axes)) != len(axes):
        view.fail("axes should name at least one axis, and none twice")
    return axes


def _infer_reduction(view: OpView) -> list[Type]:
    x = view.floating("x")
    axes = _reduced_axes(view, x.rank)
    if view.bool_attr("keepdim"):
        shape = tuple(1 if i in axes else dim for i, dim in enumerate(x.shape))
    else:
        shape = tuple(dim for i, dim in enumerate(x.shape) if i not in axes)
    return [TensorType(x.dtype, shape)]


def _reduction_rowwise(view: OpView) -> bool:
    return 0 not in _reduced_axes(view, view.tensor("x").rank)


def _reduction_cost(view: OpView, results: Sequence[Type]) -> Cost:
    return Cost(product(view.tensor("x").shape), traffic(view, results))


_BINARY = {
    "add": "x + y",
    "sub": "x - y",
    "mul": "x * y",
    "div": "x / y",
    "pow": "x to the power y",
    "max": "the larger of x and y",
    "min": "the smaller of x and y",
}
_UNARY = {
    "exp": "e to the power x",
    "rsqrt": "1 / sqrt(x)",
    "sqrt": "the square root",
    "cos": "the cosine",
    "sin": "the sine",
}
_REDUCTIONS = {"mean": "the mean over axes", "sum": "the sum over axes"}

OPS: tuple[OpDef, ...] = (
    *(
        OpDef(
            name=f"math.{name}",
            operands=("x",),
            variadic=True,
            attrs={"scalar": AttrSpec("number")},
            infer=_infer_binary,
            rowwise_when=_binary_rowwise,
            doc=f"{doc}; y is the second operand, broadcast, or the scalar attribute",
        )
        for name, doc in _BINARY.items()
    ),
    *(
        OpDef(name=f"math.{name}", operands=("x",), infer=_infer_unary, rowwise=True, doc=doc)
        for name, doc in _UNARY.items()
    ),
    *(
        OpDef(name=f"math.{name}", operands=("x",), infer=_infer_abs, rowwise=True, doc=doc)
        for name, doc in (("neg", "-x"), ("abs", "the absolute value"))
    ),
    *(
        OpDef(
            name=f"math.{name}",
            operands=("x",),
            attrs={
                "axes": AttrSpec("ints", required=True),
                "keepdim": AttrSpec("bool", False),
            },
            infer=_infer_reduction,
            cost=_reduction_cost,
            rowwise_when=_reduction_rowwise,
            doc=doc,
        )
        for name, doc in _REDUCTIONS.items()
    ),
)

"""Arithmetic and activations of the trace: broadcasting in torch's dims, emitted over IR axes."""

from collections.abc import Callable, Sequence

import torch
from torch import fx

from ropeway.compiler.frontend.importer.build import Builder
from ropeway.compiler.frontend.importer.view import View
from ropeway.compiler.ir.types import DType

Argument = View | int | float | bool
UNARY = {
    "silu": "nn.silu",
    "relu": "nn.relu",
    "tanh": "nn.tanh",
    "sigmoid": "nn.sigmoid",
    "neg": "math.neg",
    "exp": "math.exp",
    "rsqrt": "math.rsqrt",
    "sqrt": "math.sqrt",
    "cos": "math.cos",
    "sin": "math.sin",
    "abs": "math.abs",
}
BINARY = {"add": "math.add", "sub": "math.sub", "mul": "math.mul", "div": "math.div"}
BINARY |= {"pow": "math.pow", "maximum": "math.max", "minimum": "math.min"}


def unary(build: Builder, op: str, x: View, attrs: dict[str, object] | None = None) -> View:
    """One op over every element."""
    return View(build.emit(op, [x.operand], attrs), x.axes)


def binary(build: Builder, op: str, x: Argument, y: Argument, dtype: DType) -> View:
    """`x op y` with torch's broadcasting, as `dtype`; a python number becomes the scalar."""
    if isinstance(x, View) and isinstance(y, View):
        return _broadcast(build, op, build.cast(x, dtype), build.cast(y, dtype))
    if isinstance(x, View) and not isinstance(y, View):
        return _scalar(build, op, build.cast(x, dtype), y)
    if not isinstance(y, View) or isinstance(x, View):
        raise build.fail("two plain numbers meet in an op on tensors")
    return _scalar_first(build, op, float(x), build.cast(y, dtype))


def _scalar(build: Builder, op: str, x: View, y: int | float | bool) -> View:
    number = float(y) if x.type.dtype.is_float else int(y)
    neutral = {"math.add": 0, "math.sub": 0, "math.mul": 1, "math.div": 1, "math.pow": 1}
    if op in neutral and number == neutral[op]:
        return x
    return View(build.emit(op, [x.operand], {"scalar": number}), x.axes)


def _scalar_first(build: Builder, op: str, x: float, y: View) -> View:
    if op in ("math.add", "math.mul", "math.max", "math.min"):
        return _scalar(build, op, y, x)
    if op == "math.sub":
        return _scalar(build, "math.add", unary(build, "math.neg", y), x)
    if op == "math.div":
        return _scalar(build, "math.mul", _scalar(build, "math.pow", y, -1.0), x)
    raise build.fail("a number to the power of a tensor isn't supported: use exp of a product")


def _broadcast(build: Builder, op: str, x: View, y: View) -> View:
    order, rank = broadcast_order([x, y])
    operands = [arrange(build, view.padded(rank), order).operand for view in (x, y)]
    axes = [None] * rank
    for axis, dim in enumerate(order):
        axes[dim] = axis  # type: ignore[call-overload]
    return View(build.emit(op, operands), tuple(axes))


def broadcast_order(views: Sequence[View]) -> tuple[list[int], int]:
    """The torch dims that the result shows, in IR order, and its rank.

    The view with most axes leads, so that it needn't move; tokens come first.
    """
    rank = max(view.rank for view in views)
    padded = [view.padded(rank) for view in views]
    lead = max(padded, key=lambda view: (view.tokens, len(view.type.shape)))
    order = [lead.dim_of(axis) for axis in range(len(lead.type.shape))]
    shown = {dim for view in padded for dim in range(rank) if view.axes[dim] is not None}
    token_dims = {view.dim_of(0) for view in padded if view.tokens}
    extra = sorted(shown - set(order), reverse=False)
    for dim in extra:
        later = [at for at, own in enumerate(order) if own > dim and own not in token_dims]
        order.insert(later[0] if later else len(order), dim)
    return order, rank


def arrange(build: Builder, view: View, order: Sequence[int]) -> View:
    """The view over an operand that numpy broadcasting lines up with torch dims `order`."""
    shown = [dim for dim in order if view.axes[dim] is not None]
    perm = [axis for dim in shown if (axis := view.axes[dim]) is not None]
    operand = build.transposed(view.operand, perm)
    first = order.index(shown[0]) if shown else len(order)
    shape = tuple(view.size(dim) for dim in order[first:])
    operand = build.reshaped(operand, shape)
    axes: list[int | None] = [None] * view.rank
    for axis, dim in enumerate(order[first:]):
        axes[dim] = axis
    return View(operand, tuple(axes))


def scalar_of(build: Builder, node: fx.Node) -> float | int | bool | None:
    """The number that a known 0-d node is, else None."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        number = build.known.evaluate(node, build.length).item()
        return number if isinstance(number, int | float) else None
    return None


def clamp(build: Builder, x: View, low: float | int | None, high: float | int | None) -> View:
    """max(low), then min(high), each if given."""
    if low is not None:
        x = View(build.emit("math.max", [x.operand], {"scalar": low}), x.axes)
    if high is not None:
        x = View(build.emit("math.min", [x.operand], {"scalar": high}), x.axes)
    return x


def reduce(build: Builder, op: str, x: View, dims: Sequence[int], keepdim: bool) -> View:
    """Mean or sum over torch dims, none of which may be the tokens."""
    wanted = {dim % x.rank for dim in dims}
    if x.tokens and x.dim_of(0) in wanted:
        raise build.fail("a reduction over tokens mixes positions, which no cached decoder can do")
    axes = sorted(axis for dim in wanted if (axis := x.axes[dim]) is not None)
    out = x.operand
    if axes:
        out = build.emit(op, [x.operand], {"axes": tuple(axes), "keepdim": False})
    left = [axis for axis in range(len(x.type.shape)) if axis not in axes]
    shown = [
        None if dim in wanted or axis is None else left.index(axis)
        for dim, axis in enumerate(x.axes)
    ]
    if not keepdim:
        shown = [axis for dim, axis in enumerate(shown) if dim not in wanted]
    return View(out, tuple(shown))


UnaryHandler = Callable[[Builder, View], View]

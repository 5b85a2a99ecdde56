"""The functions of weight expressions: their arguments, attributes and result types. No torch.

Meanings are in `ropeway.compiler.ops.weight_functions`. `pack` is different from all others: it
changes only how a tensor is laid out for a kernel, so it may stand only at the root of an
expression and its type is the logical one; `packed_shape` gives the stored shape.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from ropeway.compiler.errors import InputError, VerifyError
from ropeway.compiler.ir.attrs import Attr
from ropeway.compiler.ir.dims import product, same
from ropeway.compiler.ir.types import DType, TensorType
from ropeway.compiler.ir.weights import Apply, WeightExpr
from ropeway.compiler.ops.definition import AttrSpec, OpView

LeafType = Callable[[WeightExpr], TensorType | None]
"""The type of a checkpoint tensor or a constant, or None when it isn't known here."""

Rule = Callable[[OpView], TensorType]


@dataclass(frozen=True)
class WeightFunction:
    """One function: how many arguments (0: any), its attributes and its type rule."""

    name: str
    arity: int
    rule: Rule
    attrs: Mapping[str, AttrSpec] = field(default_factory=dict)


def packed_shape(layout: str, kind: TensorType) -> tuple[int, ...]:
    """The stored shape of a weight of this logical type. Raises InputError.

    panel32: W[N, K] as panels of 32 rows: bf16 and f16 [N/32, K/2, 32, 2], f32 [N/32, K, 32],
    with N and K rounded up to 32. panel32_gated: the same with panel p made of rows 16p.. of W's
    first half (gates) and then those of its second half (ups); N is a multiple of 32.
    """
    if layout not in LAYOUTS:
        raise InputError(f"unknown layout {layout}: one of {', '.join(LAYOUTS)}")
    if kind.rank != 2 or not kind.dtype.is_float:
        raise InputError(f"{kind} can't be packed as {layout}: it needs floats and two axes")
    rows, width = (size if isinstance(size, int) else -1 for size in kind.shape)
    if rows < 1 or width < 1:
        raise InputError(f"{kind} can't be packed as {layout}: its shape should be known")
    if layout == "panel32_gated" and rows % 32:
        raise InputError(f"{kind} can't be packed as {layout}: its rows aren't a multiple of 32")
    panels, padded = -(-rows // 32), -(-width // 32) * 32
    if kind.dtype == DType.F32:
        return (panels, padded, 32)
    return (panels, padded // 2, 32, 2)


LAYOUTS = ("panel32", "panel32_gated")
"""Kernel layouts that `pack` knows."""


def _concat(view: OpView) -> TensorType:
    kinds = view.tensors()
    if not kinds:
        view.fail("takes at least one argument")
    first = kinds[0]
    axis = view.axis(view.int_attr("axis"), first.rank)
    for kind in kinds:
        rest = [i for i in range(first.rank) if i != axis]
        fits = kind.rank == first.rank and all(same(kind.shape[i], first.shape[i]) for i in rest)
        if kind.dtype != first.dtype or not fits:
            view.fail(f"{kind} and {first} don't join along axis {axis}")
    total = sum(kind.shape[axis] for kind in kinds)
    return TensorType(first.dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :]))


def _cast(view: OpView) -> TensorType:
    x = view.tensor("x")
    return TensorType(view.dtype_attr("dtype", x.dtype), x.shape)


def _transpose(view: OpView) -> TensorType:
    x = view.tensor("x")
    perm = view.attrs.get("perm", tuple(reversed(range(x.rank))))
    if not isinstance(perm, tuple) or sorted(map(str, perm)) != sorted(map(str, range(x.rank))):
        view.fail(f"perm should name each of the {x.rank} axes once")
    return TensorType(x.dtype, tuple(x.shape[view.axis(i, x.rank)] for i in perm))


def _reshape(view: OpView) -> TensorType:
    x, shape = view.tensor("x"), view.dims_attr("shape")
    if not same(product(x.shape), product(shape)):
        view.fail(f"{x} doesn't have the {product(shape)} elements of the new shape")
    return TensorType(x.dtype, shape)


def _slice(view: OpView) -> TensorType:
    x = view.tensor("x")
    axis = view.axis(view.int_attr("axis"), x.rank)
    start, stop, size = view.int_attr("start"), view.int_attr("stop"), x.shape[axis]
    if not isinstance(size, int) or not 0 <= start < stop <= size:
        view.fail(f"{start}..{stop} isn't inside axis {axis} of {x}")
    return TensorType(x.dtype, (*x.shape[:axis], stop - start, *x.shape[axis + 1 :]))


def _expand(view: OpView) -> TensorType:
    x, shape = view.tensor("x"), view.dims_attr("shape")
    tail = shape[len(shape) - x.rank :] if len(shape) >= x.rank else ()
    pairs = list(zip(x.shape, tail, strict=False))
    if len(pairs) != x.rank or not all(same(a, b) or same(a, 1) for a, b in pairs):
        view.fail(f"{x} doesn't expand to {TensorType(x.dtype, shape)}")
    return TensorType(x.dtype, shape)


def _scalar_arithmetic(view: OpView) -> TensorType:
    return view.floating("x")


def _pairwise(view: OpView) -> TensorType:
    x, y = view.floating("x"), view.floating("y")
    if x != y:
        view.fail(f"{x} and {y} should be of one type")
    return x


def _pack(view: OpView) -> TensorType:
    x = view.tensor("x")
    try:
        packed_shape(view.str_attr("layout"), x)
    except InputError as error:
        view.fail(str(error))
    return x


_AXIS = AttrSpec("int", required=True)
_SCALAR = AttrSpec("float", required=True)

FUNCTIONS: dict[str, WeightFunction] = {
    entry.name: entry
    for entry in (
        WeightFunction("concat", 0, _concat, {"axis": _AXIS}),
        WeightFunction("cast", 1, _cast, {"dtype": AttrSpec("dtype", required=True)}),
        WeightFunction("transpose", 1, _transpose, {"perm": AttrSpec("ints")}),
        WeightFunction("reshape", 1, _reshape, {"shape": AttrSpec("ints", required=True)}),
        WeightFunction("expand", 1, _expand, {"shape": AttrSpec("ints", required=True)}),
        WeightFunction(
            "slice",
            1,
            _slice,
            {"axis": _AXIS, "start": AttrSpec("int", 0), "stop": AttrSpec("int", required=True)},
        ),
        WeightFunction("add_scalar", 1, _scalar_arithmetic, {"scalar": _SCALAR}),
        WeightFunction("mul_scalar", 1, _scalar_arithmetic, {"scalar": _SCALAR}),
        WeightFunction("add", 2, _pairwise),
        WeightFunction("mul", 2, _pairwise),
        WeightFunction("pack", 1, _pack, {"layout": AttrSpec("str", required=True)}),
    )
}


def get(name: str) -> WeightFunction:
    """The function of this name. Raises VerifyError with the nearest name."""
    if name not in FUNCTIONS:
        near = difflib.get_close_matches(name, FUNCTIONS, 1, 0.0)[0]
        message = f"unknown weight function {name}: did you mean {near}?"
        raise VerifyError(message, code="W01", rule="weight function")
    return FUNCTIONS[name]


def filled_attrs(expr: Apply) -> dict[str, Attr]:
    """The attributes with defaults. Raises VerifyError for a wrong, unknown or missing one."""
    function = get(expr.fn)
    given = expr.attr
    unknown = [key for key in given if key not in function.attrs]
    if unknown:
        _refuse(f"{expr.fn} has no attribute {unknown[0]}")
    filled: dict[str, Attr] = {}
    for key, spec in function.attrs.items():
        value = given.get(key, spec.default)
        if value is None and spec.required:
            _refuse(f"{expr.fn} needs the attribute {key}")
        if value is None:
            continue
        if spec.fault(value):
            _refuse(f"{expr.fn}: attribute {key} {spec.fault(value)}")
        filled[key] = value
    return filled


def check_expr(expr: WeightExpr, root: bool = True) -> None:
    """Checks names, argument counts, attributes, and that pack is only at the root."""
    if not isinstance(expr, Apply):
        return
    function = get(expr.fn)
    filled_attrs(expr)
    if function.arity and len(expr.args) != function.arity:
        _refuse(f"{expr.fn} takes {function.arity} arguments, and got {len(expr.args)}")
    if expr.fn == "pack" and not root:
        _refuse("pack may stand only at the root of an expression")
    for arg in expr.args:
        check_expr(arg, root=False)


def infer_type(expr: WeightExpr, leaf: LeafType) -> TensorType | None:
    """The type of an expression, or None when a leaf's isn't known. Raises VerifyError."""
    if not isinstance(expr, Apply):
        return leaf(expr)
    args = [infer_type(arg, leaf) for arg in expr.args]
    known = [kind for kind in args if kind is not None]
    if len(known) != len(args):
        return None
    view = OpView(expr.fn, _argument_names(len(known)), tuple(known), {}, filled_attrs(expr))
    return get(expr.fn).rule(view)


def _argument_names(count: int) -> tuple[str, ...]:
    return ("x", "y")[:count] if count <= 2 else tuple(f"x{i}" for i in range(count))


def _refuse(message: str) -> NoReturn:
    raise VerifyError(message, code="W02", rule="weight expression")

"""Shape and data movement. All shapes are logical and row-major."""

from ropeway.compiler.ir.dims import Dim, canonical, product, same
from ropeway.compiler.ir.types import TensorType, Type
from ropeway.compiler.ops.definition import AttrSpec, OpDef, OpView, movement_cost

_SHAPE = {"shape": AttrSpec("dims", required=True)}


def _infer_reshape(view: OpView) -> list[Type]:
    x = view.tensor("x")
    shape = view.dims_attr("shape")
    if not same(product(x.shape), product(shape)):
        view.fail(f"{x} doesn't have the {product(shape)} elements of the new shape")
    return [TensorType(x.dtype, shape)]


def _keeps_rows(view: OpView) -> bool:
    x, shape = view.tensor("x"), view.dims_attr("shape")
    return bool(x.shape and shape) and same(x.shape[0], shape[0])


def _infer_transpose(view: OpView) -> list[Type]:
    x = view.tensor("x")
    perm = [view.axis(axis, x.rank) for axis in view.dims_attr("perm")]
    if sorted(perm) != list(range(x.rank)):
        view.fail(f"perm should name each of the {x.rank} axes once")
    return [TensorType(x.dtype, tuple(x.shape[axis] for axis in perm))]


def _transpose_rowwise(view: OpView) -> bool:
    return bool(view.dims_attr("perm")) and view.dims_attr("perm")[0] == 0


def _infer_slice(view: OpView) -> list[Type]:
    x = view.tensor("x")
    axis = view.axis(view.int_attr("axis"), x.rank)
    start, stop = view.attrs["start"], view.attrs["stop"]
    size = canonical(stop - start)  # type: ignore[operator]  # both of kind dim
    inside = not isinstance(x.shape[axis], int) or not isinstance(stop, int)
    if not inside and isinstance(x.shape[axis], int) and isinstance(stop, int):
        inside = stop <= x.shape[axis]
    if not inside or (isinstance(start, int) and start < 0):
        view.fail(f"{start}..{stop} isn't inside axis {axis} of {x}")
    if isinstance(size, int) and size <= 0:
        view.fail(f"{start}..{stop} is empty")
    return [TensorType(x.dtype, (*x.shape[:axis], size, *x.shape[axis + 1 :]))]


def _axis_is_not_rows(view: OpView) -> bool:
    return view.axis(view.int_attr("axis"), view.tensors()[0].rank) != 0


def _infer_concat(view: OpView) -> list[Type]:
    operands = view.tensors()
    if not operands:
        view.fail("takes at least one operand")
    first = operands[0]
    axis = view.axis(view.int_attr("axis"), first.rank)
    total: Dim = 0
    for kind in operands:
        view.check_dtype("every operand", kind, first.dtype)
        fits = kind.rank == first.rank and all(
            same(a, b)
            for i, (a, b) in enumerate(zip(kind.shape, first.shape, strict=True))
            if i != axis
        )
        if not fits:
            view.fail(f"{kind} and {first} differ off axis {axis}")
        total = total + kind.shape[axis]
    return [TensorType(first.dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :]))]


def _infer_cast(view: OpView) -> list[Type]:
    x = view.tensor("x")
    return [TensorType(view.dtype_attr("dtype", x.dtype), x.shape)]


def _infer_expand(view: OpView) -> list[Type]:
    x, shape = view.tensor("x"), view.dims_attr("shape")
    tail = shape[len(shape) - x.rank :] if len(shape) >= x.rank else ()
    if len(tail) != x.rank or not all(
        same(a, b) or same(a, 1) for a, b in zip(x.shape, tail, strict=True)
    ):
        view.fail(f"{x} doesn't expand to {TensorType(x.dtype, shape)}")
    return [TensorType(x.dtype, shape)]


def _infer_gather_rows(view: OpView) -> list[Type]:
    x, rows = view.tensor("x"), view.indices("rows")
    if not x.shape:
        view.fail("x should have a leading axis")
    return [TensorType(x.dtype, (rows.shape[0], *x.shape[1:]))]


OPS: tuple[OpDef, ...] = (
    OpDef(
        name="tensor.reshape",
        operands=("x",),
        attrs=_SHAPE,
        infer=_infer_reshape,
        cost=movement_cost,
        rowwise_when=_keeps_rows,
        doc="the same elements, in row-major order, as another shape",
    ),
    OpDef(
        name="tensor.transpose",
        operands=("x",),
        attrs={"perm": AttrSpec("ints", required=True)},
        infer=_infer_transpose,
        cost=movement_cost,
        rowwise_when=_transpose_rowwise,
        doc="axis i of the result is axis perm[i] of x",
    ),
    OpDef(
        name="tensor.slice",
        operands=("x",),
        attrs={
            "axis": AttrSpec("int", required=True),
            "start": AttrSpec("dim", 0),
            "stop": AttrSpec("dim", required=True),
        },
        infer=_infer_slice,
        cost=movement_cost,
        rowwise_when=_axis_is_not_rows,
        doc="elements start..stop-1 of one axis",
    ),
    OpDef(
        name="tensor.concat",
        operands=(),
        variadic=True,
        attrs={"axis": AttrSpec("int", required=True)},
        infer=_infer_concat,
        cost=movement_cost,
        rowwise_when=_axis_is_not_rows,
        doc="operands joined along one axis",
    ),
    OpDef(
        name="tensor.cast",
        operands=("x",),
        attrs={"dtype": AttrSpec("dtype", required=True)},
        infer=_infer_cast,
        cost=movement_cost,
        rowwise=True,
        doc="x rounded to another element type",
    ),
    OpDef(
        name="tensor.expand",
        operands=("x",),
        attrs=_SHAPE,
        infer=_infer_expand,
        cost=movement_cost,
        rowwise_when=_keeps_rows,
        doc="x broadcast to a shape",
    ),
    OpDef(
        name="tensor.gather_rows",
        operands=("x", "rows"),
        infer=_infer_gather_rows,
        cost=movement_cost,
        doc="rows i32[L] of x[T, ...], as [L, ...]",
    ),
)

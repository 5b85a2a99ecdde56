"""One function per IR op: which kernel calls it becomes.

`LOWERINGS` is the whole of what target cpu takes; legalize refuses everything else by name. Views
(slice, reshape, transpose, expand) make no kernel call.
"""

from collections.abc import Callable, Sequence

from ropeway.compiler.ir.attrs import Attr
from ropeway.compiler.ir.graph import Op, Operand
from ropeway.compiler.ir.types import CacheType, TensorType
from ropeway.compiler.ir.weights import Weight
from ropeway.compiler.ops.registry import attr
from ropeway.compiler.targets.cpu.builder import (
    PlanBuilder,
    inner_shape,
    refuse,
    row_kind,
    tensor_type,
)
from ropeway.compiler.targets.cpu.kernel_table import MAX_HEAD_DIM
from ropeway.compiler.targets.cpu.plan import Layout, Ref
from ropeway.compiler.targets.cpu.views import View

Lowering = Callable[[PlanBuilder, Op], None]
Params = dict[str, int | float | str]


def _embedding(plan: PlanBuilder, op: Op) -> None:
    table, ids = op.args
    y = plan.result(op)
    operands = {"ids": plan.input(op, ids), "table": plan.weight(op, table), "y": y.ref}
    plan.step("embedding", op, plan.rows_of(y), operands)


def _gather_rows(plan: PlanBuilder, op: Op) -> None:
    x = plan.dense(op, op.args[0])
    y = plan.result(op)
    operands = {"x": x.ref, "index": plan.input(op, op.args[1]), "y": y.ref}
    plan.step("gather_rows", op, "rows", operands)


# --- norms and linear ---


def _vectors(plan: PlanBuilder, op: Op, operands: dict[str, Ref], names: Sequence[str]) -> None:
    """Optional row-shaped weights such as gain and bias."""
    for name in names:
        if name in op.kwargs:
            operands[name] = plan.weight(op, op.kwargs[name], "rows")


def _norm_params(op: Op) -> Params:
    return {"eps": _number(op, "eps"), "offset": _number(op, "offset")}


def _rms_norm(plan: PlanBuilder, op: Op) -> None:
    _norm(plan, op, "rms_norm", ("gain",), _norm_params(op))


def _layer_norm(plan: PlanBuilder, op: Op) -> None:
    _norm(plan, op, "layer_norm", ("gain", "bias"), {"eps": _number(op, "eps")})


def _norm(plan: PlanBuilder, op: Op, kernel: str, vectors: Sequence[str], params: Params) -> None:
    """Over the last axis; axes between the rows and it become heads."""
    x = plan.dense(op, op.args[0])
    y = plan.result(op)
    width = x.shape[-1]
    shape = (x.ref.width // width, width)
    operands = {"x": _shaped(op, x, shape).ref, "y": _shaped(op, y, shape).ref}
    _vectors(plan, op, operands, vectors)
    plan.step(kernel, op, plan.rows_of(y), operands, params)


def _shaped(op: Op, view: View, shape: Sequence[int]) -> View:
    shaped = view.reshape(shape)
    if shaped is None:
        raise refuse(op, "an operand isn't dense")
    return shaped


def _add_rms_norm(plan: PlanBuilder, op: Op) -> None:
    x, residual = plan.dense(op, op.args[0]), plan.dense(op, op.args[1])
    y, total = plan.result(op, 0), plan.result(op, 1)
    operands = {"x": x.ref, "residual": residual.ref, "sum": total.ref, "y": y.ref}
    _vectors(plan, op, operands, ("gain",))
    plan.step("rms_norm", op, plan.rows_of(y), operands, _norm_params(op))


def _gemm(plan: PlanBuilder, op: Op, x: Operand, weight: Operand, operands: dict[str, Ref]) -> None:
    """The matrix product of an op, its norm before and its gated unit behind it.

    `operands` holds what comes before the product.
    """
    source = plan.dense(op, x)
    if len(source.shape) != 1:
        raise refuse(op, f"a linear over {tensor_type(op, x)}, which isn't a matrix")
    y = plan.result(op, 0)
    gated = op.name.endswith("_glu")
    layout: Layout = "panel32_gated" if gated else "panel32"
    operands |= {"x": source.ref, "weight": plan.weight(op, weight, layout), "y": y.ref}
    _vectors(plan, op, operands, ("bias",))
    normed = "norm" in op.name
    norm = _norm_params(op) if normed else {"eps": 0.0, "offset": 0.0}
    params: Params = {"norm": int(normed), **norm}
    if gated:
        params["act"] = str(attr(op, "act"))
    plan.step("gemm_glu" if gated else "gemm", op, plan.rows_of(y), operands, params)


def _linear(plan: PlanBuilder, op: Op) -> None:
    _gemm(plan, op, op.args[0], op.args[1], {})


def _rms_norm_linear(plan: PlanBuilder, op: Op) -> None:
    x, gain, weight = op.args
    _gemm(plan, op, x, weight, {"gain": plan.weight(op, gain, "rows")})


def _add_rms_norm_linear(plan: PlanBuilder, op: Op) -> None:
    x, residual, gain, weight = op.args
    operands = {
        "residual": plan.dense(op, residual).ref,
        "gain": plan.weight(op, gain, "rows"),
        "sum": plan.result(op, 1).ref,
    }
    _gemm(plan, op, x, weight, operands)


def _glu(plan: PlanBuilder, op: Op) -> None:
    x, y = plan.dense(op, op.args[0]), plan.result(op)
    if len(x.shape) != 1:
        raise refuse(op, "a gated unit over more than one axis")
    act = str(attr(op, "act"))
    plan.step("glu", op, plan.rows_of(y), {"x": x.ref, "y": y.ref}, {"act": act})


# --- attention ---


def _rope(plan: PlanBuilder, op: Op) -> None:
    """nn.rope on one tensor, nn.rope_qk on two."""
    paired = op.name == "nn.rope_qk"
    positions, table = op.args[-2:]
    q = plan.dense(op, op.args[0])
    k = plan.dense(op, op.args[1]) if paired else None
    operands = {
        "q": q.ref,
        "positions": plan.input(op, positions),
        "table": plan.weight(op, table, "rows"),
        "q_out": _rotated(plan, op, 0, q).ref,
    }
    if k is not None:
        operands |= {"k": k.ref, "k_out": _rotated(plan, op, 1, k).ref}
    rotary = _whole(op, "rotary_dim")
    params: Params = {"rotary_dim": rotary, "interleaved": int(bool(attr(op, "interleaved")))}
    plan.step("rope", op, "tokens", operands, params)


def _rotated(plan: PlanBuilder, op: Op, number: int, source: View) -> View:
    """Where a rotated tensor goes: over its source when nobody else reads that."""
    if plan.aliasing.only_reader(op, op.args[number]):
        return plan.define(op.results[number], source)
    return plan.result(op, number)


def _paged_attention(plan: PlanBuilder, op: Op) -> None:
    """A cache write, then attention that reads everything back from the cache."""
    q, k, v, cache, slots, block_table, query_start, lengths = op.args
    if isinstance(cache.type, CacheType):
        for plane in cache.type.planes:
            if plane.shape[-1] > MAX_HEAD_DIM:
                raise refuse(op, f"head_dim {plane.shape[-1]} is over {MAX_HEAD_DIM}")
    kept = plan.cache(op, cache)
    written = {
        "k": plan.dense(op, k).ref,
        "v": plan.dense(op, v).ref,
        "cache": kept,
        "slots": plan.input(op, slots),
    }
    queries = plan.dense(op, q)
    plan.step("kv_write", op, "tokens", written)
    operands = {
        "q": queries.ref,
        "cache": kept,
        "block_table": plan.input(op, block_table),
        "query_start": plan.input(op, query_start),
        "lengths": plan.input(op, lengths),
        "y": plan.result(op).ref,
    }
    params: Params = {
        "window": _whole(op, "window"),
        "scale": _number(op, "scale"),
        "softcap": _number(op, "softcap"),
    }
    plan.step("attention", op, "tokens", operands, params)


# --- general element-wise ops, reductions, shapes ---


def _operand(plan: PlanBuilder, op: Op, operand: Operand, shape: tuple[int, ...]) -> Ref:
    """A value or a weight, broadcast to rows of `shape`."""
    if not isinstance(operand, Weight):
        view = plan.view(op, operand)
        if len(tensor_type(op, operand).shape) > len(shape) + 1:
            raise refuse(op, f"%{operand.name} has more axes than the result")
        return view.expand(shape).ref if view.shape != shape else view.ref
    ref = plan.weight(op, operand, "rows")
    sizes, strides = ref.shape, ref.strides
    if len(sizes) > len(shape):
        if sizes[0] != 1:
            raise refuse(op, f"weight @{operand.name} differs from row to row")
        sizes, strides = sizes[1:], strides[1:]
    missing = len(shape) - len(sizes)
    spread = tuple(0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True))
    return Ref("weights", ref.index, ref.dtype, shape, (0,) * missing + spread)


def _unary(kernel_op: str) -> Lowering:
    def lower(plan: PlanBuilder, op: Op) -> None:
        name = kernel_op
        if op.name == "nn.gelu" and str(attr(op, "approximate")) == "tanh":
            name = "gelu_tanh"
        y = plan.result(op)
        x = _operand(plan, op, op.args[0], y.shape)
        plan.step("unary", op, plan.rows_of(y), {"x": x, "y": y.ref}, {"op": name})

    return lower


def _binary(kernel_op: str) -> Lowering:
    def lower(plan: PlanBuilder, op: Op) -> None:
        other = op.args[1] if len(op.args) > 1 else op.kwargs.get("y")
        y = plan.result(op)
        operands = {"a": _operand(plan, op, op.args[0], y.shape), "y": y.ref}
        if other is not None:
            operands["b"] = _operand(plan, op, other, y.shape)
        scalar = _number(op, "scalar") if "scalar" in op.attrs else 0.0
        params: Params = {"scalar": scalar, "op": kernel_op}
        plan.step("binary", op, plan.rows_of(y), operands, params)

    return lower


def _inner_axes(op: Op, kind: TensorType, axes: Sequence[int]) -> list[int]:
    """Axes counted after the leading one, which no op may touch."""
    found = sorted(axis % len(kind.shape) for axis in axes)
    if not found or found[0] == 0:
        raise refuse(op, f"it mixes the rows of {kind}")
    return [axis - 1 for axis in found]


def _reduce(kernel_op: str) -> Lowering:
    def lower(plan: PlanBuilder, op: Op) -> None:
        x = plan.view(op, op.args[0])
        axes = _inner_axes(op, tensor_type(op, op.args[0]), _tuple(attr(op, "axes")))
        kept = [axis for axis in range(len(x.shape)) if axis not in axes]
        y = plan.result(op)
        target = _shaped(op, y, tuple(x.shape[axis] for axis in kept))
        operands = {"x": x.transpose([*kept, *axes]).ref, "y": target.ref}
        params: Params = {"reduced": len(axes), "op": kernel_op}
        plan.step("reduce", op, plan.rows_of(y), operands, params)

    return lower


def _softmax(plan: PlanBuilder, op: Op) -> None:
    x = plan.view(op, op.args[0])
    (axis,) = _inner_axes(op, tensor_type(op, op.args[0]), [_whole(op, "axis")])
    order = [*(other for other in range(len(x.shape)) if other != axis), axis]
    y = plan.result(op)
    operands = {"x": x.transpose(order).ref, "y": y.transpose(order).ref}
    plan.step("softmax", op, plan.rows_of(y), operands)


def _concat(plan: PlanBuilder, op: Op) -> None:
    y = plan.result(op)
    (axis,) = _inner_axes(op, tensor_type(op, op.results[0]), [_whole(op, "axis")])
    start = 0
    for operand in op.args:
        width = int(
            tensor_type(op, operand).shape[axis + (0 if isinstance(operand, Weight) else 1)]
        )
        part = y.slice(axis, start, start + width)
        x = _operand(plan, op, operand, part.shape)
        plan.step("unary", op, plan.rows_of(y), {"x": x, "y": part.ref}, {"op": "copy"})
        start += width


def _slice(plan: PlanBuilder, op: Op) -> None:
    kind = tensor_type(op, op.args[0])
    (axis,) = _inner_axes(op, kind, [_whole(op, "axis")])
    view = plan.view(op, op.args[0])
    start, stop, _ = slice(_whole(op, "start"), _whole(op, "stop")).indices(view.shape[axis])
    plan.define(op.results[0], view.slice(axis, start, stop))


def _reshape(plan: PlanBuilder, op: Op) -> None:
    kind = tensor_type(op, op.results[0])
    view = plan.view(op, op.args[0])
    if row_kind(op, kind) != plan.rows_of(view):
        raise refuse(op, "it changes the rows")
    shape = inner_shape(op, kind)
    plan.define(op.results[0], view.reshape(shape) or plan.dense(op, op.args[0], shape))


def _transpose(plan: PlanBuilder, op: Op) -> None:
    given = _tuple(attr(op, "perm"))
    perm = [axis % len(given) for axis in given]
    if perm[0] != 0:
        raise refuse(op, "it moves the rows to another axis")
    view = plan.view(op, op.args[0])
    plan.define(op.results[0], view.transpose([axis - 1 for axis in perm[1:]]))


def _expand(plan: PlanBuilder, op: Op) -> None:
    kind = tensor_type(op, op.results[0])
    view = plan.view(op, op.args[0])
    if len(kind.shape) != len(view.shape) + 1 or row_kind(op, kind) != plan.rows_of(view):
        raise refuse(op, "it adds an axis before the rows")
    plan.define(op.results[0], view.expand(inner_shape(op, kind)))


def _tuple(value: Attr) -> tuple[int, ...]:
    items = value if isinstance(value, tuple) else (value,)
    return tuple(_integer(item) for item in items)


def _integer(value: object) -> int:
    return int(str(value))


def _whole(op: Op, name: str) -> int:
    """An integer attribute, or its default."""
    return _integer(attr(op, name))


def _number(op: Op, name: str) -> float:
    """A float attribute, or its default."""
    return float(str(attr(op, name)))


_ELEMENTWISE = ("neg", "exp", "rsqrt", "sqrt", "cos", "sin", "abs")

LOWERINGS: dict[str, Lowering] = {
    "nn.embedding": _embedding,
    "tensor.gather_rows": _gather_rows,
    "nn.rms_norm": _rms_norm,
    "nn.add_rms_norm": _add_rms_norm,
    "nn.layer_norm": _layer_norm,
    "nn.linear": _linear,
    "nn.rms_norm_linear": _rms_norm_linear,
    "nn.add_rms_norm_linear": _add_rms_norm_linear,
    "nn.linear_glu": _linear,
    "nn.rms_norm_linear_glu": _rms_norm_linear,
    "nn.add_rms_norm_linear_glu": _add_rms_norm_linear,
    "nn.glu": _glu,
    "nn.rope": _rope,
    "nn.rope_qk": _rope,
    "nn.paged_attention": _paged_attention,
    "nn.silu": _unary("silu"),
    "nn.gelu": _unary("gelu"),
    "nn.relu": _unary("relu"),
    "nn.tanh": _unary("tanh"),
    "nn.sigmoid": _unary("sigmoid"),
    "nn.softmax": _softmax,
    **{
        f"math.{name}": _unary(name)
        for name in ("neg", "exp", "rsqrt", "sqrt", "cos", "sin", "abs")
    },
    **{f"math.{name}": _binary(name) for name in ("add", "sub", "mul", "div", "pow", "max", "min")},
    "math.mean": _reduce("mean"),
    "math.sum": _reduce("sum"),
    "tensor.cast": _unary("copy"),
    "tensor.concat": _concat,
    "tensor.slice": _slice,
    "tensor.reshape": _reshape,
    "tensor.transpose": _transpose,
    "tensor.expand": _expand,
}

"""Neural-network ops as models use them. Activations are token-major: [T, ...], no batch axis."""

from collections.abc import Sequence

from ropeway.compiler.ir.dims import Dim, product
from ropeway.compiler.ir.types import DType, TensorType, Type
from ropeway.compiler.ops.definition import (
    AttrSpec,
    Cost,
    OpDef,
    OpView,
    tensor_bytes,
    traffic,
)

EPS = {"eps": AttrSpec("float", required=True)}
NORM_ATTRS = {**EPS, "offset": AttrSpec("float", 0.0)}
OUT = {"out": AttrSpec("dtype")}
ATTENTION_ATTRS = {
    "scale": AttrSpec("float", required=True),
    "window": AttrSpec("int", 0),
    "softcap": AttrSpec("float", 0.0),
}
ROPE_ATTRS = {
    "rotary_dim": AttrSpec("int", required=True),
    "interleaved": AttrSpec("bool", False),
}


def linear_type(view: OpView, x: TensorType) -> TensorType:
    """x[..., K] times w[N, K] transposed, plus bias[N]: [..., N]."""
    w = view.floating("w", 2)
    if x.rank < 1:
        view.fail("x should have at least one axis")
    view.check_same(x.shape[-1], w.shape[1], f"K of x {x} and w {w}")
    view.check_dtype("w", w, x.dtype)
    view.vector("bias", w.shape[0], x.dtype)
    return TensorType(view.dtype_attr("out", x.dtype), (*x.shape[:-1], w.shape[0]))


def linear_flops(view: OpView, x: TensorType) -> Dim:
    """Two operations for every weight and row."""
    return product((*x.shape[:-1], *view.tensor("w").shape, 2))


def check_norm(view: OpView, x: TensorType) -> None:
    """A norm over the last axis, with its optional gain and bias."""
    if x.rank < 1:
        view.fail("x should have at least one axis")
    view.vector("gain", x.shape[-1], x.dtype)
    view.vector("bias", x.shape[-1], x.dtype)


def heads(view: OpView) -> tuple[TensorType, TensorType, TensorType]:
    """The checked q[T,H,D], k[T,KH,D] and v[T,KH,DV] of an attention."""
    q, k, v = view.floating("q", 3), view.floating("k", 3), view.floating("v", 3)
    view.check_dtype("k", k, q.dtype)
    view.check_dtype("v", v, q.dtype)
    view.check_same(q.shape[0], k.shape[0], "tokens of q and k")
    view.check_same(k.shape[0], v.shape[0], "tokens of k and v")
    view.check_same(q.shape[2], k.shape[2], "head size of q and k")
    view.check_same(k.shape[1], v.shape[1], "heads of k and v")
    queries, keys = q.shape[1], k.shape[1]
    if not isinstance(queries, int) or not isinstance(keys, int) or keys < 1 or queries % keys:
        view.fail(f"{queries} query heads aren't a multiple of {keys} key heads")
    if view.int_attr("window") < 0 or view.float_attr("softcap") < 0:
        view.fail("window and softcap should be 0 (none) or positive")
    return q, k, v


def check_rope(view: OpView, x: TensorType, name: str) -> None:
    """One rotated operand against positions and table."""
    positions, table = view.indices("positions"), view.tensor("table", 2)
    rotary = view.int_attr("rotary_dim")
    view.check_dtype("table", table, DType.F32)
    view.check_same(x.shape[0], positions.shape[0], f"tokens of {name} and positions")
    view.check_same(table.shape[1], rotary, "rotary_dim and the table's width")
    size = x.shape[2]
    if rotary < 2 or rotary % 2 or not isinstance(size, int) or rotary > size:
        view.fail(f"rotary_dim {rotary} should be even and at most the head size {size}")


def _infer_embedding(view: OpView) -> list[Type]:
    table, ids = view.floating("table", 2), view.indices("ids")
    return [TensorType(table.dtype, (ids.shape[0], table.shape[1]))]


def _embedding_cost(view: OpView, results: Sequence[Type]) -> Cost:
    return Cost(0, tensor_bytes(view.type("ids")) + 2 * tensor_bytes(results[0]))


def _infer_linear(view: OpView) -> list[Type]:
    return [linear_type(view, view.floating("x"))]


def _linear_cost(view: OpView, results: Sequence[Type]) -> Cost:
    return Cost(linear_flops(view, view.tensor("x")), traffic(view, results))


def _infer_norm(view: OpView) -> list[Type]:
    x = view.floating("x")
    check_norm(view, x)
    return [x]


def _norm_cost(view: OpView, results: Sequence[Type]) -> Cost:
    return Cost(product((*view.tensor("x").shape, 4)), traffic(view, results))


def _infer_activation(view: OpView) -> list[Type]:
    return [view.floating("x")]


def _infer_softmax(view: OpView) -> list[Type]:
    x = view.floating("x")
    view.axis(view.int_attr("axis"), x.rank)
    return [x]


def _softmax_rowwise(view: OpView) -> bool:
    return view.axis(view.int_attr("axis"), view.tensor("x").rank) != 0


def _infer_sdpa(view: OpView) -> list[Type]:
    q, _, v = heads(view)
    return [TensorType(q.dtype, (q.shape[0], q.shape[1], v.shape[2]))]


def _sdpa_cost(view: OpView, results: Sequence[Type]) -> Cost:
    q, v = view.tensor("q"), view.tensor("v")
    tokens, count, size = q.shape
    flops = 2 * tokens * tokens * count * (size + v.shape[2])
    return Cost(product((flops,)), traffic(view, results))


def _infer_rope(view: OpView) -> list[Type]:
    x = view.floating("x", 3)
    check_rope(view, x, "x")
    return [x]


def _rope_cost(view: OpView, results: Sequence[Type]) -> Cost:
    x, rotary = view.tensor("x"), view.int_attr("rotary_dim")
    flops = product((x.shape[0], x.shape[1], 3 * rotary))
    return Cost(flops, 2 * tensor_bytes(x) + product((x.shape[0], 4 * rotary + 4)))


def _has_rows(view: OpView) -> bool:
    """The last axis is mixed, so rows need an axis of their own."""
    return view.tensor("x").rank > 1


_ACTIVATIONS = {
    "silu": "x * sigmoid(x)",
    "relu": "max(x, 0)",
    "tanh": "the hyperbolic tangent",
    "sigmoid": "1 / (1 + exp(-x))",
}

OPS: tuple[OpDef, ...] = (
    OpDef(
        name="nn.embedding",
        operands=("table", "ids"),
        infer=_infer_embedding,
        cost=_embedding_cost,
        rowwise=True,
        doc="rows ids i32[T] of table[V, H]",
    ),
    OpDef(
        name="nn.linear",
        operands=("x", "w"),
        optional=("bias",),
        attrs=OUT,
        infer=_infer_linear,
        cost=_linear_cost,
        rowwise_when=_has_rows,
        doc="x[T, K] @ w[N, K].T + bias[N], accumulated in f32; `out` is the result's dtype",
    ),
    OpDef(
        name="nn.rms_norm",
        operands=("x",),
        optional=("gain",),
        attrs=NORM_ATTRS,
        infer=_infer_norm,
        cost=_norm_cost,
        rowwise_when=_has_rows,
        doc="x / sqrt(mean(x^2) + eps) * (offset + gain) over the last axis, in f32",
    ),
    OpDef(
        name="nn.layer_norm",
        operands=("x",),
        optional=("gain", "bias"),
        attrs=EPS,
        infer=_infer_norm,
        cost=_norm_cost,
        rowwise_when=_has_rows,
        doc="(x - mean) / sqrt(variance + eps) * gain + bias over the last axis, in f32",
    ),
    *(
        OpDef(name=f"nn.{name}", operands=("x",), infer=_infer_activation, rowwise=True, doc=doc)
        for name, doc in _ACTIVATIONS.items()
    ),
    OpDef(
        name="nn.gelu",
        operands=("x",),
        attrs={"approximate": AttrSpec("str", "none", choices=("none", "tanh"))},
        infer=_infer_activation,
        rowwise=True,
        doc="x times the normal distribution's CDF, or its tanh approximation",
    ),
    OpDef(
        name="nn.softmax",
        operands=("x",),
        attrs={"axis": AttrSpec("int", required=True)},
        infer=_infer_softmax,
        cost=_norm_cost,
        rowwise_when=_softmax_rowwise,
        doc="exp(x - max) / sum over one axis",
    ),
    OpDef(
        name="nn.sdpa",
        operands=("q", "k", "v"),
        attrs={**ATTENTION_ATTRS, "causal": AttrSpec("bool", True)},
        infer=_infer_sdpa,
        cost=_sdpa_cost,
        doc=(
            "attention of ONE sequence: q[T,H,D], k[T,KH,D], v[T,KH,DV] -> [T,H,DV]; query head h "
            "reads key head h*KH//H; window w: key j is visible to query i iff i-w < j <= i; "
            "softcap c: scores become c*tanh(score/c)"
        ),
    ),
    OpDef(
        name="nn.rope",
        operands=("x", "positions", "table"),
        attrs=ROPE_ATTRS,
        infer=_infer_rope,
        cost=_rope_cost,
        rowwise=True,
        doc=(
            "rotates the first rotary_dim of x[T,H,D]; row p of table f32[P, rotary_dim] holds the "
            "cosines of position p, then the sines; pairs are (i, i + rotary_dim/2), or "
            "(2i, 2i+1) when interleaved"
        ),
    ),
)

"""Fused ops: each equals a chain of plain ops, intermediate roundings included."""

from collections.abc import Sequence

from ropeway.compiler.ir.dims import product
from ropeway.compiler.ir.types import TensorType, Type
from ropeway.compiler.ops.definition import AttrSpec, Cost, OpDef, OpView, traffic
from ropeway.compiler.ops.defs.nn import (
    ATTENTION_ATTRS,
    NORM_ATTRS,
    OUT,
    ROPE_ATTRS,
    check_norm,
    check_rope,
    heads,
    linear_flops,
    linear_type,
)

GLU_ACTS = ("silu", "gelu", "gelu_tanh")
ACT = {"act": AttrSpec("str", "silu", choices=GLU_ACTS)}


def _infer_glu(view: OpView) -> list[Type]:
    x = view.floating("gate_up")
    width = x.shape[-1] if x.shape else 0
    if not isinstance(width, int) or width < 2 or width % 2:
        view.fail(f"the last axis of gate_up should be even, and is {width}")
    return [TensorType(x.dtype, (*x.shape[:-1], width // 2))]


def _sum_type(view: OpView) -> TensorType:
    x, residual = view.floating("x"), view.floating("residual")
    if x != residual:
        view.fail(f"x {x} and residual {residual} should be of one type")
    return x


def _infer_add_rms_norm(view: OpView) -> list[Type]:
    kind = _sum_type(view)
    check_norm(view, kind)
    return [kind, kind]


def _norm_linear_type(view: OpView) -> TensorType:
    x = view.floating("x")
    view.vector("gain", x.shape[-1] if x.shape else 0, x.dtype)
    return linear_type(view, x)


def _infer_rms_norm_linear(view: OpView) -> list[Type]:
    return [_norm_linear_type(view)]


def _infer_add_rms_norm_linear(view: OpView) -> list[Type]:
    total = _sum_type(view)
    return [_norm_linear_type(view), total]


def _halved(view: OpView, kind: TensorType) -> TensorType:
    """What nn.glu makes of a linear's result."""
    width = kind.shape[-1]
    if not isinstance(width, int) or width < 2 or width % 2:
        view.fail(f"w should have an even number of rows, gates and ups, and has {width}")
    return TensorType(kind.dtype, (*kind.shape[:-1], width // 2))


def _infer_linear_glu(view: OpView) -> list[Type]:
    return [_halved(view, linear_type(view, view.floating("x")))]


def _infer_rms_norm_linear_glu(view: OpView) -> list[Type]:
    return [_halved(view, _norm_linear_type(view))]


def _infer_add_rms_norm_linear_glu(view: OpView) -> list[Type]:
    total = _sum_type(view)
    return [_halved(view, _norm_linear_type(view)), total]


def _linear_glu_cost(view: OpView, results: Sequence[Type]) -> Cost:
    return Cost(linear_flops(view, view.tensor("x")), traffic(view, results))


def _norm_linear_cost(view: OpView, results: Sequence[Type]) -> Cost:
    x = view.tensor("x")
    return Cost(linear_flops(view, x) + product((*x.shape, 5)), traffic(view, results))


def _infer_rope_qk(view: OpView) -> list[Type]:
    q, k = view.floating("q", 3), view.floating("k", 3)
    view.check_dtype("k", k, q.dtype)
    check_rope(view, q, "q")
    check_rope(view, k, "k")
    return [q, k]


def _rope_qk_cost(view: OpView, results: Sequence[Type]) -> Cost:
    q, k, rotary = view.tensor("q"), view.tensor("k"), view.int_attr("rotary_dim")
    flops = product((q.shape[0], 3 * rotary, q.shape[1] + k.shape[1]))
    return Cost(flops, traffic(view, results))


def _infer_paged_attention(view: OpView) -> list[Type]:
    q, k, v = heads(view)
    cache = view.cache("cache")
    for name, kind in (("k", k), ("v", v)):
        plane = cache.plane(name)
        if plane is None or plane.shape != kind.shape[1:]:
            view.fail(f"{cache} should have a plane {name} of the shape of {kind} per token")
    tokens, slots = q.shape[0], view.indices("slots")
    table, lengths = view.indices("block_table", 2), view.indices("lengths")
    view.check_same(slots.shape[0], tokens, "tokens of slots and q")
    view.check_same(table.shape[0], lengths.shape[0], "requests of block_table and lengths")
    starts = view.indices("query_start").shape[0]
    view.check_same(starts, lengths.shape[0] + 1, "query_start and requests + 1")
    if view.int_attr("block_size") < 1:
        view.fail("block_size should be positive")
    return [TensorType(q.dtype, (tokens, q.shape[1], v.shape[2]))]


def _paged_attention_cost(view: OpView, results: Sequence[Type]) -> Cost:
    """An upper bound: every request as long as its block table allows."""
    q, v = view.tensor("q"), view.tensor("v")
    requests, blocks = view.tensor("block_table").shape
    context = blocks * view.int_attr("block_size")
    tokens, count, size = q.shape
    flops = product((2 * tokens, context, count, size + v.shape[2]))
    planes = view.cache("cache").planes
    per_token = sum(int(product(p.shape)) * p.dtype.itemsize for p in planes)
    read = product((requests, context, per_token))
    return Cost(flops, traffic(view, results) + read + product((tokens, per_token)))


OPS: tuple[OpDef, ...] = (
    OpDef(
        name="nn.glu",
        operands=("gate_up",),
        attrs=ACT,
        infer=_infer_glu,
        rowwise=True,
        doc="act(first half of the last axis) * second half; act's result is rounded to the dtype",
    ),
    OpDef(
        name="nn.add_rms_norm",
        operands=("x", "residual"),
        optional=("gain",),
        attrs=NORM_ATTRS,
        infer=_infer_add_rms_norm,
        rowwise=True,
        doc="(rms_norm(sum), sum) where sum = x + residual, rounded to the dtype before the norm",
    ),
    OpDef(
        name="nn.rms_norm_linear",
        operands=("x", "gain", "w"),
        optional=("bias",),
        attrs={**NORM_ATTRS, **OUT},
        infer=_infer_rms_norm_linear,
        cost=_norm_linear_cost,
        rowwise=True,
        doc="linear(rms_norm(x, gain), w, bias); the norm is rounded to x's dtype",
    ),
    OpDef(
        name="nn.add_rms_norm_linear",
        operands=("x", "residual", "gain", "w"),
        optional=("bias",),
        attrs={**NORM_ATTRS, **OUT},
        infer=_infer_add_rms_norm_linear,
        cost=_norm_linear_cost,
        rowwise=True,
        doc="(linear(rms_norm(sum, gain), w, bias), sum); sum and norm are rounded to x's dtype",
    ),
    OpDef(
        name="nn.linear_glu",
        operands=("x", "w"),
        optional=("bias",),
        attrs=ACT,
        infer=_infer_linear_glu,
        cost=_linear_glu_cost,
        rowwise=True,
        doc="glu(linear(x, w, bias)), the linear's result rounded to x's dtype",
    ),
    OpDef(
        name="nn.rms_norm_linear_glu",
        operands=("x", "gain", "w"),
        optional=("bias",),
        attrs={**NORM_ATTRS, **ACT},
        infer=_infer_rms_norm_linear_glu,
        cost=_norm_linear_cost,
        rowwise=True,
        doc="glu(rms_norm_linear(x, gain, w, bias))",
    ),
    OpDef(
        name="nn.add_rms_norm_linear_glu",
        operands=("x", "residual", "gain", "w"),
        optional=("bias",),
        attrs={**NORM_ATTRS, **ACT},
        infer=_infer_add_rms_norm_linear_glu,
        cost=_norm_linear_cost,
        rowwise=True,
        doc="(glu(y), sum) where (y, sum) = add_rms_norm_linear(x, residual, gain, w, bias)",
    ),
    OpDef(
        name="nn.rope_qk",
        operands=("q", "k", "positions", "table"),
        attrs=ROPE_ATTRS,
        infer=_infer_rope_qk,
        cost=_rope_qk_cost,
        rowwise=True,
        doc="nn.rope of q and of k",
    ),
    OpDef(
        name="nn.paged_attention",
        operands=(
            "q",
            "k",
            "v",
            "cache",
            "slots",
            "block_table",
            "query_start",
            "lengths",
        ),
        attrs={**ATTENTION_ATTRS, "block_size": AttrSpec("int", required=True)},
        infer=_infer_paged_attention,
        reads=("cache",),
        writes=("cache",),
        cost=_paged_attention_cost,
        doc=(
            "writes k and v of token t to cache slot slots[t] (block slot//block_size), then "
            "attends as nn.sdpa over each request's context, read back as stored. Request r owns "
            "tokens query_start[r]..query_start[r+1]-1; its token j has position lengths[r] - "
            "(query_start[r+1] - query_start[r]) + j; lengths count the context with this step's "
            "tokens; block_table[r, i] is the block of positions i*block_size onwards"
        ),
    ),
)

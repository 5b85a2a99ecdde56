"""Embedding, linear, norms and attention of the trace."""

import math
from collections.abc import Sequence

import torch
from torch import fx

from ropeway.compiler.frontend.importer.build import TOKENS, Builder
from ropeway.compiler.frontend.importer.elementwise import binary
from ropeway.compiler.frontend.importer.locations import describe
from ropeway.compiler.frontend.importer.masks import window_of
from ropeway.compiler.frontend.importer.tables import position_table
from ropeway.compiler.frontend.importer.view import View
from ropeway.compiler.ir.graph import Operand, Value
from ropeway.compiler.ir.types import DType
from ropeway.compiler.ir.weights import Weight


def plain_weight(build: Builder, view: View, what: str) -> Weight:
    """A parameter in torch's order of dims, transposed where it is defined if need be."""
    if not isinstance(view.operand, Weight):
        view = View(_computed_weight(build, view.operand, what), view.axes)
    assert isinstance(view.operand, Weight)
    weight = build.transposed(view.operand, [axis for axis in view.axes if axis is not None])
    assert isinstance(weight, Weight)
    shape = tuple(int(view.size(dim)) for dim in range(view.rank))
    shaped = build.reshaped(weight, shape)
    assert isinstance(shaped, Weight)
    return shaped


def _computed_weight(build: Builder, operand: Operand, what: str) -> Weight:
    """A number added to or multiplied with a parameter (1 + g), as a weight of its own."""
    op = operand.producer if isinstance(operand, Value) else None
    fn = {"math.add": "add_scalar", "math.mul": "mul_scalar"}.get(op.name if op else "")
    if op is None or fn is None or "scalar" not in op.attrs or not isinstance(op.args[0], Weight):
        raise build.fail(f"{what} is computed in the step; it must be a parameter")
    weight = op.args[0]
    shape = tuple(int(size) for size in weight.type.shape)
    return build.derived(weight, fn, shape, scalar=op.attrs["scalar"])


def embedding(build: Builder, table: View, ids: View) -> View:
    """Rows of a parameter by token ids or positions."""
    weight = plain_weight(build, table, "the embedding table")
    if ids.type.rank != 1 or not ids.tokens:
        raise build.fail("an embedding is looked up by something else than ids or positions")
    rows = build.emit("nn.embedding", [weight, ids.operand])
    return View(rows, (*ids.axes, 1))


def position_embedding(build: Builder, table: View, ids: fx.Node) -> View:
    """Rows of a parameter by a known index per position: learned positions, perhaps offset."""
    weight = plain_weight(build, table, "the table of positions")
    shape = build.dims(ids.meta["val"])
    at = [dim for dim, size in enumerate(shape) if not isinstance(size, int)]
    axes = tuple(0 if dim in at else None for dim in range(len(shape)))
    stored = int(weight.type.shape[0])
    if len(at) != 1 or any(size != 1 for dim, size in enumerate(shape) if dim not in at):
        raise build.fail(f"an embedding is looked up by {describe(ids)}, not by position")
    rows = position_table(build.known, ids, at[0], build.length).rows[:, 0]
    start = int(rows[0])
    if not torch.equal(rows, torch.arange(start, start + len(rows), dtype=rows.dtype)):
        raise build.fail(f"positions are looked up in the order of {describe(ids)}, not one by one")
    if start + build.length > stored:
        raise build.fail(
            f"the model has {stored - start} positions; give max_model_len <= {stored - start}"
        )
    if start:
        size = (stored - start, int(weight.type.shape[1]))
        weight = build.derived(weight, "slice", size, axis=0, start=start, stop=stored)
    return View(build.emit("nn.embedding", [weight, build.positions]), (*axes, 1))


def linear(build: Builder, x: View, w: View, bias: View | None) -> View:
    """x @ w.T + bias over the last torch dim."""
    weight = plain_weight(build, w, "the weight of a linear")
    if weight.type.rank != 2 or not x.tokens:
        raise build.fail("a linear needs a 2-d parameter and an input that depends on tokens")
    x = build.with_axis(x, x.rank - 1)
    if x.axes[-1] != x.type.rank - 1:
        x = build.in_torch_order(x)
        if x.axes[-1] != x.type.rank - 1:
            raise build.fail("a linear runs over the sequence, which no cached decoder can do")
    kwargs = {"bias": None if bias is None else plain_weight(build, bias, "a bias")}
    return View(build.emit("nn.linear", [x.operand, weight], None, kwargs), x.axes)


def matmul(build: Builder, x: View, w: View) -> View:
    """x @ w for a parameter w."""
    if not isinstance(w.operand, Weight) or w.rank != 2:
        raise build.fail(
            "two computed values are multiplied as matrices: attention must be "
            "torch.nn.functional.scaled_dot_product_attention (attn_implementation='sdpa')"
        )
    return linear(build, x, w.permuted((1, 0)), None)


def norm(
    build: Builder,
    op: str,
    x: View,
    shape: Sequence[int],
    eps: float,
    *,
    gain: View | None = None,
    bias: View | None = None,
) -> View:
    """rms_norm or layer_norm over the last torch dim."""
    if len(shape) != 1 or x.axes[-1] != x.type.rank - 1 or not x.tokens:
        raise build.fail("a norm runs over several dims; only the last one may be normed")
    kwargs = {
        "gain": None if gain is None else plain_weight(build, gain, "a norm's gain"),
        "bias": None if bias is None else plain_weight(build, bias, "a norm's bias"),
    }
    given = {key: value for key, value in kwargs.items() if value is not None}
    return View(build.emit(op, [x.operand], {"eps": eps}, given), x.axes)


def attention(
    build: Builder,
    qkv: tuple[View, View, View],
    mask: fx.Node | None,
    causal: bool,
    scale: float | None,
) -> View:
    """scaled_dot_product_attention of one sequence; torch's dims are [1, heads, T, size]."""
    if mask is None and not causal:
        raise build.fail("attention sees the whole sequence; only causal models compile")
    window = 0 if mask is None else window_of(build.known, mask, build.length)
    dtype = qkv[0].type.dtype
    heads = []
    for view in qkv:
        if view.rank != 4 or not view.tokens or view.dim_of(0) != 2:
            raise build.fail("attention takes q, k and v as [1, heads, tokens, size]")
        whole = build.in_torch_order(build.with_axis(build.with_axis(view, 3), 1))
        heads.append(build.cast(whole, dtype).operand)
    size = qkv[0].size(3)
    attrs = {"scale": scale if scale is not None else 1 / math.sqrt(int(size)), "causal": True}
    window = window if window < build.length else 0
    out = build.emit("nn.sdpa", heads, {**attrs, "window": window})
    assert out.type.shape[0] == TOKENS  # type: ignore[union-attr]
    return View(out, (None, 1, 0, 2))


def add_bias(build: Builder, x: View, bias: View | None, dtype: DType) -> View:
    """x + bias, or x."""
    return x if bias is None else binary(build, "math.add", x, bias, dtype)

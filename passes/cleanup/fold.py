"""fold: an op over weights alone becomes a weight expression, evaluated once at compile time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from ropeway.compiler.ir.graph import Op
from ropeway.compiler.ir.types import TensorType
from ropeway.compiler.ir.weights import Apply, Weight
from ropeway.compiler.pipeline.base import Numerics, Phase
from ropeway.compiler.pipeline.match import Attempt
from ropeway.compiler.pipeline.rewrite_pass import RewritePass

FOLDED = {
    "tensor.cast": "cast",
    "tensor.concat": "concat",
    "tensor.expand": "expand",
    "tensor.reshape": "reshape",
    "tensor.slice": "slice",
    "tensor.transpose": "transpose",
    "math.add": "add",
    "math.mul": "mul",
}
"""Ops and the weight functions that do the same; attributes carry over by name."""


@dataclass(frozen=True)
class Fold(RewritePass):
    """tensor.transpose(@w) -> @w.transpose, and likewise for the ops of FOLDED. EXACT."""

    name: ClassVar[str] = "fold"
    phase: ClassVar[Phase] = "cleanup"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    anchors: ClassVar[tuple[str, ...]] = tuple(FOLDED)

    def rewrite(self, attempt: Attempt, op: Op) -> None:
        m = attempt
        weights = [m.weight(operand, "an operand") for operand in op.args]
        m.require(not m.rewriter.is_output(op.result), "the function doesn't return it")
        kind = op.result.type
        if not isinstance(kind, TensorType):
            m.fail("the result is a tensor")
        same = all(weight.type == kind for weight in weights)
        m.require(
            same or not op.name.startswith("math."), "arithmetic on weights of one type (no casts)"
        )
        expr = _expression(op, weights)
        name = m.rewriter.fresh_weight(f"{weights[0].name}.{expr.fn}")
        folded = m.rewriter.module.add_weight(Weight(name, kind, expr))
        m.rewriter.replace_op(op, [folded])


def _expression(op: Op, weights: list[Weight]) -> Apply:
    fn, attrs = FOLDED[op.name], dict(op.attrs)
    if "scalar" in attrs:
        fn, attrs = f"{fn}_scalar", {"scalar": float(cast(float, attrs["scalar"]))}
    return Apply(fn, tuple(weight.expr for weight in weights), tuple(attrs.items()))

"""fuse-add-norm: a residual addition and the RMS norm that follows become one op.

The sum stays a result: it is the residual of the next addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.graph import Op, Operand, Value
from ropeway.compiler.pipeline.base import Numerics, Phase
from ropeway.compiler.pipeline.emit import emit
from ropeway.compiler.pipeline.match import Attempt
from ropeway.compiler.pipeline.rewrite_pass import RewritePass


@dataclass(frozen=True)
class FuseAddNorm(RewritePass):
    """nn.rms_norm(math.add(a, b)) -> nn.add_rms_norm(x, residual) giving (normed, sum).

    EXACT: the sum is rounded to the activation dtype before the statistics are taken, as apart.
    """

    name: ClassVar[str] = "fuse-add-norm"
    phase: ClassVar[Phase] = "fuse"
    requires: ClassVar[frozenset[str]] = frozenset({"norms-raised"})
    establishes: ClassVar[frozenset[str]] = frozenset({"add-norm-fused"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    anchors: ClassVar[tuple[str, ...]] = ("nn.rms_norm", "nn.layer_norm")

    def rewrite(self, attempt: Attempt, op: Op) -> None:
        m = attempt
        add = m.producer(op.args[0], "the normed value", "math.add")
        m.require(op.name == "nn.rms_norm", "an RMS norm: layer norms have no fused kernel")
        m.require(len(add.args) == 2, "the sum of two values, not of a value and a number", add)
        a, b = (m.value(operand, "a summand") for operand in add.args)
        m.require(a.type == b.type, "both summands have the type of the sum (no broadcast)", add)
        x, residual = _order(m, a, b)
        fused = emit(
            m.rewriter,
            add,
            "nn.add_rms_norm",
            [x, residual],
            kwargs=op.kwargs,
            attrs=op.attrs,
            loc=op.loc,
            names=[op.result.name, "sum"],
        )
        m.rewriter.replace(op.result, fused.results[0])
        m.rewriter.replace(add.result, fused.results[1])
        m.rewriter.erase(op)
        m.rewriter.erase(add)


def _order(m: Attempt, a: Value, b: Value) -> tuple[Operand, Operand]:
    """(x, residual): the residual stream is the summand that was made earlier."""
    ops = m.rewriter.function.ops
    made = {id(result): at for at, op in enumerate(ops) for result in op.results}
    return (a, b) if made.get(id(b), -1) <= made.get(id(a), -1) else (b, a)

"""raise-gqa: key and value heads repeated for the query heads become grouped-query attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.graph import Op, Operand, Value
from ropeway.compiler.ir.types import TensorType
from ropeway.compiler.pipeline.base import Numerics, Phase
from ropeway.compiler.pipeline.match import Attempt
from ropeway.compiler.pipeline.rewrite_pass import RewritePass
from ropeway.passes.raising.chains import erase_dead


@dataclass(frozen=True)
class RaiseGqa(RewritePass):
    """nn.sdpa(q, repeat(k), repeat(v)) -> nn.sdpa(q, k, v), which repeats by itself. EXACT.

    A repeat is an expand behind a reshape that puts the copies of a head side by side, or one
    head expanded to all.
    """

    name: ClassVar[str] = "raise-gqa"
    phase: ClassVar[Phase] = "raise"
    establishes: ClassVar[frozenset[str]] = frozenset({"gqa-raised"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    anchors: ClassVar[tuple[str, ...]] = ("nn.sdpa",)

    def rewrite(self, attempt: Attempt, op: Op) -> None:
        m = attempt
        sources = [_repeated(m, op.args[1], "k"), _repeated(m, op.args[2], "v")]
        heads = [_shape(source)[1] for source in sources]
        m.require(heads[0] == heads[1], "k and v repeat equally many heads")
        old = op.args[1:3]
        for key, source in zip((1, 2), sources, strict=True):
            m.rewriter.set_operand(op, key, source)
        for operand in old:
            if isinstance(operand, Value) and operand.producer is not None:
                erase_dead(m.rewriter, operand.producer)


def _shape(operand: Operand) -> tuple[object, ...]:
    kind = operand.type
    return kind.shape if isinstance(kind, TensorType) else ()


def _repeated(m: Attempt, operand: Operand, what: str) -> Operand:
    """x[T, KH, D] of a value [T, KH * n, D] that holds each head of x n times in a row."""
    tokens, _, size = _shape(operand)
    top = m.producer(operand, what, "tensor.reshape", "tensor.expand")
    expand = top
    if top.name == "tensor.reshape":
        expand = m.producer(top.args[0], f"the reshaped {what}", "tensor.expand")
    before, after = _shape(expand.args[0]), _shape(expand.result)
    if expand is top:
        m.require(before == (tokens, 1, size), f"{what} expands a single head", expand)
        return expand.args[0]
    m.require(
        len(after) == 4 and before == (after[0], after[1], 1, after[3]),
        f"{what} repeats each head by an axis of its own",
        expand,
    )
    single = m.producer(expand.args[0], f"the repeated {what}", "tensor.reshape")
    wanted = (after[0], after[1], after[3])
    m.require(_shape(single.args[0]) == wanted, f"{what} has heads [T, KH, D]", single)
    return single.args[0]

"""pack-weights: matrices get the layout that the target's matrix product reads.

Packing is an expression over the weight, evaluated when the artifact is written. A matrix that is
an embedding table too (a tied head) is stored once, packed: the lookup reads rows out of panels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.graph import Module, Op, OperandKey
from ropeway.compiler.ir.rewrite import Rewriter
from ropeway.compiler.ir.weights import Apply, Weight, apply
from ropeway.compiler.ops import registry
from ropeway.compiler.pipeline.base import Numerics, Pass, PassContext, PassResult, Phase
from ropeway.passes.lowering.linear_glu import FUSED

_GATED = frozenset(FUSED.values())
_LINEAR = frozenset(FUSED) | _GATED


@dataclass(frozen=True)
class PackWeights(Pass):
    """Wraps the weight of every linear in pack(...) {layout}; a match is a weight.

    A weight that is also read by an op that can't read panels keeps a plain copy under its own
    name; the packed one is then called NAME.packed. The weight of a gated linear, which nobody
    else reads, gets the layout's `_gated` form.
    """

    layout: str = "panel32"

    name: ClassVar[str] = "pack-weights"
    phase: ClassVar[Phase] = "lower"
    requires: ClassVar[frozenset[str]] = frozenset({"legal"})
    establishes: ClassVar[frozenset[str]] = frozenset({"packed"})
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        module = module.clone()
        sites: list[str] = []
        for function in module.functions.values():
            rewriter = Rewriter(function, module)
            for weight in _matrices(function.ops):
                uses = rewriter.uses(weight)
                packed = self._packed(weight, gated=any(op.name in _GATED for op, _ in uses))
                if not all(_reads_panels(op, key) for op, key in uses):
                    module.add_weight(packed)
                    for op, key in uses:
                        if _is_matrix(op, key):
                            rewriter.set_operand(op, key, packed)
                else:
                    weight.expr = packed.expr
                sites.append(f"@{weight.name}")
        return PassResult(module, len(sites), tuple(sites))

    def _packed(self, weight: Weight, gated: bool) -> Weight:
        layout = f"{self.layout}_gated" if gated else self.layout
        expr = apply("pack", weight.expr, layout=layout)
        return Weight(f"{weight.name}.packed", weight.type, expr)


def _matrices(ops: list[Op]) -> list[Weight]:
    """Weights that some linear reads and that aren't packed yet, in order of use."""
    found: dict[str, Weight] = {}
    for op in ops:
        for key, operand in op.operands():
            if not isinstance(operand, Weight) or not _is_matrix(op, key):
                continue
            if not (isinstance(operand.expr, Apply) and operand.expr.fn == "pack"):
                found.setdefault(operand.name, operand)
    return list(found.values())


def _is_matrix(op: Op, key: OperandKey) -> bool:
    """Whether this operand is the weight of a linear."""
    return op.name in _LINEAR and key == registry.get(op.name).operands.index("w")


def _reads_panels(op: Op, key: OperandKey) -> bool:
    """Whether the kernel behind this operand reads panels."""
    return _is_matrix(op, key) or (op.name == "nn.embedding" and key == 0)

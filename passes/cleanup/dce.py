"""dce: drop ops whose results nobody reads, and weights that no op reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.graph import Module
from ropeway.compiler.ir.rewrite import Rewriter
from ropeway.compiler.ir.weights import Weight
from ropeway.compiler.ops.registry import get
from ropeway.compiler.pipeline.base import Numerics, Pass, PassContext, PassResult, Phase
from ropeway.compiler.pipeline.match import describe_op


@dataclass(frozen=True)
class Dce(Pass):
    """Ops that write a cache stay; inputs stay, since the runtime fills them by role. EXACT."""

    name: ClassVar[str] = "dce"
    phase: ClassVar[Phase] = "cleanup"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        module = module.clone()
        sites: list[str] = []
        for function in module.functions.values():
            rewriter = Rewriter(function, module)
            for op in reversed(list(function.ops)):
                dead = all(rewriter.is_dead(result) for result in op.results)
                if dead and not get(op.name).writes:
                    rewriter.erase(op)
                    sites.append(describe_op(op))
        used = {
            operand.name
            for function in module.functions.values()
            for op in function.ops
            for _, operand in op.operands()
            if isinstance(operand, Weight)
        }
        for name in [name for name in module.weights if name not in used]:
            del module.weights[name]
            sites.append(f"weight @{name}")
        return PassResult(module, len(sites), tuple(sites))

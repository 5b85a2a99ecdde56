"""cse: compute equal things once; name equal weights once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.attrs import attr_key
from ropeway.compiler.ir.graph import Function, Module, Op
from ropeway.compiler.ir.rewrite import Rewriter
from ropeway.compiler.ir.weights import Weight
from ropeway.compiler.ops.registry import get
from ropeway.compiler.pipeline.base import Numerics, Pass, PassContext, PassResult, Phase
from ropeway.compiler.pipeline.match import describe_op

COMMUTATIVE = frozenset({"math.add", "math.mul", "math.max", "math.min"})


@dataclass(frozen=True)
class Cse(Pass):
    """An op equal to an earlier one goes; so does a weight with another's expression. EXACT.

    Merging weights also ties a head that a checkpoint names a second time.
    """

    name: ClassVar[str] = "cse"
    phase: ClassVar[Phase] = "cleanup"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        module = module.clone()
        sites: list[str] = []
        kept: dict[object, Weight] = {}
        twins = {
            name: first
            for name, weight in module.weights.items()
            if (first := kept.setdefault((weight.type, weight.expr), weight)) is not weight
        }
        for function in module.functions.values():
            rewriter = Rewriter(function, module)
            for name, first in twins.items():
                rewriter.replace(module.weights[name], first)
            _merge_ops(rewriter, function, sites)
        for name in twins:
            del module.weights[name]
            sites.append(f"weight @{name}")
        return PassResult(module, len(sites), tuple(sites))


def _merge_ops(rewriter: Rewriter, function: Function, sites: list[str]) -> None:
    seen: dict[object, Op] = {}
    for op in list(function.ops):
        definition = get(op.name)
        if definition.writes or definition.reads:
            continue  # what a cache holds changes between two equal reads
        first = seen.setdefault(_key(op), op)
        if first is not op:
            rewriter.replace_op(op, first.results)
            sites.append(describe_op(op))


def _key(op: Op) -> object:
    args = [id(operand) for operand in op.args]
    if op.name in COMMUTATIVE:
        args.sort()
    return (
        op.name,
        tuple(args),
        tuple(sorted((name, id(operand)) for name, operand in op.kwargs.items())),
        tuple(sorted((name, attr_key(value)) for name, value in op.attrs.items())),
        tuple(result.type for result in op.results),
    )

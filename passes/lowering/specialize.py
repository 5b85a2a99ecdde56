"""specialize: one bucket's step, with numbers in place of T, R and L.

The cpu target needs no module per bucket (its plans differ by offsets alone); this pass is for
targets that capture a graph per bucket, and for looking at one: `ropeway opt step.ir -p
"specialize{tokens=64}"`. MB and NB stay symbols: they depend on the request and the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.errors import PipelineError
from ropeway.compiler.ir.attrs import Attr
from ropeway.compiler.ir.dims import Dim, is_dim, substitute
from ropeway.compiler.ir.graph import Module, Op
from ropeway.compiler.pipeline.base import Numerics, Pass, PassContext, PassResult, Phase


@dataclass(frozen=True)
class Specialize(Pass):
    """Substitutes sizes for dims; 0 leaves a dim as it is. A match is an op whose types changed."""

    tokens: int = 1
    requests: int = 0
    rows: int = 0

    name: ClassVar[str] = "specialize"
    phase: ClassVar[Phase] = "lower"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        given = {"T": self.tokens, "R": self.requests, "L": self.rows}
        sizes: dict[str, Dim] = {name: size for name, size in given.items() if size}
        for name, size in given.items():
            low, high = module.dims.get(name, (1, size))
            if size and not low <= size <= high:
                raise PipelineError(
                    f"specialize: {name} = {size} is outside {low}..{high} of @{module.name}: "
                    f"choose a size within"
                )
        module = module.clone()
        for name in sizes:
            module.dims.pop(name, None)
        sites: list[str] = []
        for function in module.functions.values():
            for entry in function.inputs:
                entry.value.type = entry.value.type.substitute(sizes)
            for op in function.ops:
                if _specialize(op, sizes):
                    sites.append(op.loc or op.name)
        return PassResult(module, len(sites), tuple(sites))


def _specialize(op: Op, sizes: Mapping[str, Dim]) -> bool:
    """Substitute in an op's result types and attributes; whether a type changed."""
    before = [result.type for result in op.results]
    for result in op.results:
        result.type = result.type.substitute(sizes)
    op.attrs = {name: _bind(value, sizes) for name, value in op.attrs.items()}
    return before != [result.type for result in op.results]


def _bind(value: Attr, sizes: Mapping[str, Dim]) -> Attr:
    if isinstance(value, tuple):
        return tuple(_one(item, sizes) for item in value)
    return _one(value, sizes)


def _one(value: Attr, sizes: Mapping[str, Dim]) -> Attr:
    return substitute(value, sizes) if is_dim(value) and not isinstance(value, int) else value

"""A pass that tries one pattern at every op of some names and rewrites where it matches.

The pass works on a clone; sites and near misses are recorded here, so that a pattern only says
what it requires and what it builds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.graph import Function, Module, Op
from ropeway.compiler.ir.rewrite import Rewriter
from ropeway.compiler.pipeline.base import NearMiss, Pass, PassContext, PassResult
from ropeway.compiler.pipeline.match import Attempt, Miss, describe_op


@dataclass(frozen=True)
class RewritePass(Pass):
    """Base of pattern passes: set `anchors`, write `rewrite`.

    `rewrite` states all its constraints on the attempt before it changes anything.
    """

    anchors: ClassVar[tuple[str, ...]] = ()

    def rewrite(self, attempt: Attempt, op: Op) -> None:
        """Match at `op` and apply; raises Miss (through the attempt) where it doesn't match."""
        raise NotImplementedError(f"pass {type(self).__name__} doesn't define rewrite")

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        module = module.clone()
        sites: list[str] = []
        misses: list[NearMiss] = []
        for function in module.functions.values():
            self._run_function(function, module, sites, misses)
        return PassResult(module, len(sites), tuple(sites), tuple(misses))

    def _run_function(
        self, function: Function, module: Module, sites: list[str], misses: list[NearMiss]
    ) -> None:
        rewriter = Rewriter(function, module)
        for op in [op for op in function.ops if op.name in self.anchors]:
            if not any(op is live for live in function.ops):
                continue  # an earlier match took it in
            site = op.loc or describe_op(op)
            try:
                self.rewrite(Attempt(op, rewriter), op)
            except Miss as miss:
                if self.phase != "cleanup":  # tidying is expected to find little
                    misses.append(miss.near)
            else:
                sites.append(site)

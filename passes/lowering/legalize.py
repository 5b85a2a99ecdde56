"""legalize: take only what the target can run, and fix what the target decides.

The target decides the size of a KV block. Everything else that it can't do is refused here, by the
name of the op and the line of the model's source, before any time goes into weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.errors import TargetError
from ropeway.compiler.ir.graph import Module, Op, Value
from ropeway.compiler.ir.types import CacheType, TensorType
from ropeway.compiler.pipeline.base import Numerics, Pass, PassContext, PassResult, Phase
from ropeway.compiler.targets.base import Capabilities, activate

_INDEX_TYPES = frozenset({"i32"})


@dataclass(frozen=True)
class Legalize(Pass):
    """Sets block_size of nn.paged_attention; a match is an op that changed.

    Raises TargetError for an op or an element type that the target doesn't have.
    """

    target: str = "cpu"

    name: ClassVar[str] = "legalize"
    phase: ClassVar[Phase] = "lower"
    establishes: ClassVar[frozenset[str]] = frozenset({"legal"})
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        capabilities = activate(self.target, "legalize").target.capabilities()
        module = module.clone()
        sites: list[str] = []
        for function in module.functions.values():
            for op in function.ops:
                self._check(op, capabilities)
                if op.name == "nn.paged_attention":
                    if op.attrs.get("block_size") != capabilities.block_size:
                        sites.append(op.loc or op.name)
                    op.attrs["block_size"] = capabilities.block_size
        return PassResult(module, len(sites), tuple(sites))

    def _check(self, op: Op, capabilities: Capabilities) -> None:
        where = f"{op.name} at {op.loc}" if op.loc else op.name
        if op.name not in capabilities.ops:
            raise TargetError(
                f"target {self.target} has no {where}: {_advice(op)}, or compile for target "
                f"reference"
            )
        allowed = capabilities.dtypes | _INDEX_TYPES
        for operand in [*(operand for _, operand in op.operands()), *op.results]:
            for dtype in _dtypes(operand.type):
                if dtype not in allowed:
                    raise TargetError(
                        f"target {self.target} can't run {where}: {operand.name} is {dtype}, it "
                        f"has {', '.join(sorted(capabilities.dtypes))}: compile with bfloat16 or "
                        f"float32"
                    )


def _dtypes(kind: TensorType | CacheType) -> list[str]:
    if isinstance(kind, CacheType):
        return [plane.dtype.value for plane in kind.planes]
    return [kind.dtype.value]


def _advice(op: Op) -> str:
    """What usually helps against an op that is missing."""
    if op.name == "nn.sdpa":
        inputs = ", ".join(f"%{arg.name}" for arg in op.args if isinstance(arg, Value))
        return f"its attention over {inputs} isn't paged: run the pass fuse-attention"
    return "write the model with another op there"

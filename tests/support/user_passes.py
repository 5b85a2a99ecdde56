"""Small passes for pipeline tests, as a user would write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.graph import Module
from ropeway.compiler.pipeline.base import NearMiss, Pass, PassContext, PassResult


@dataclass(frozen=True)
class Mark(Pass):
    """Writes its options into the module's metadata."""

    size: int = 3
    ratio: float = 0.5
    label: str = ""
    deep: bool = False
    axes: tuple[int, ...] = ()
    names: tuple[str, ...] = ("a",)

    name: ClassVar[str] = "mark"

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        module = module.clone()
        module.metadata["mark"] = self.size
        misses = (NearMiss("nn.silu %a", "far", depth=0), NearMiss("nn.silu %b", "near", depth=2))
        return PassResult(module, 2, ("here", "there"), (*misses, NearMiss("x", "far")))


@dataclass(frozen=True)
class ScaleLogits(Pass):
    """A wrong pass: the first norm's eps grows, which only the numerics can show."""

    name: ClassVar[str] = "scale-logits"

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        module = module.clone()
        norm = next(op for op in module.fn.ops if "eps" in op.attrs)
        norm.attrs["eps"] = 0.25
        return PassResult(module, 1, ("norm",))


@dataclass(frozen=True)
class SwapOperands(Pass):
    """A wrong pass: the result type of an op is no longer what its rule gives."""

    name: ClassVar[str] = "swap-operands"

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        module = module.clone()
        reshape = next(op for op in module.fn.ops if op.name == "tensor.reshape")
        reshape.attrs["shape"] = (1, 2, 3)
        return PassResult(module, 1, ("reshape",))


@dataclass(frozen=True)
class Crash(Pass):
    """A wrong pass: it raises."""

    name: ClassVar[str] = "crash"

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        raise KeyError("weights")


@dataclass(frozen=True)
class Needs(Pass):
    name: ClassVar[str] = "needs"
    requires: ClassVar[frozenset[str]] = frozenset({"fact"})

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        return PassResult(module)


@dataclass(frozen=True)
class Gives(Pass):
    name: ClassVar[str] = "gives"
    establishes: ClassVar[frozenset[str]] = frozenset({"fact"})

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        return PassResult(module)


@dataclass(frozen=True)
class Takes(Pass):
    name: ClassVar[str] = "takes"
    destroys: ClassVar[frozenset[str]] = frozenset({"fact"})

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        return PassResult(module)

"""Weights as expressions over checkpoint tensors, evaluated once when an artifact is written.

Fusing, sharding and quantizing rewrite expressions; nothing is computed here. The functions that
an `Apply` may name are registered in `ropeway.compiler.ops.weight_types`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ropeway.compiler.ir.attrs import Attr, attr_key, normalize_attr
from ropeway.compiler.ir.types import TensorType


@dataclass(frozen=True)
class Ckpt:
    """A tensor of the checkpoint, by its name there."""

    name: str


@dataclass(frozen=True)
class Const:
    """A tensor derived at import time (a rope table, a folded constant), by its store name."""

    name: str


@dataclass(frozen=True, eq=False)
class Apply:
    """A weight function over expressions, e.g. concat(a, b) {axis = 0}."""

    fn: str
    args: tuple["WeightExpr", ...]
    attrs: tuple[tuple[str, Attr], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", tuple(self.args))
        attrs = tuple((key, normalize_attr(value)) for key, value in self.attrs)
        object.__setattr__(self, "attrs", attrs)

    def _key(self) -> object:
        return self.fn, self.args, tuple((key, attr_key(value)) for key, value in self.attrs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Apply) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    @property
    def attr(self) -> Mapping[str, Attr]:
        """The attributes by name."""
        return dict(self.attrs)


WeightExpr: TypeAlias = Ckpt | Const | Apply


def apply(fn: str, *args: WeightExpr, **attrs: Attr) -> Apply:
    """`fn(args) {attrs}`, e.g. apply("concat", a, b, axis=0)."""
    return Apply(fn, args, tuple(attrs.items()))


def leaves(expr: WeightExpr) -> Iterator[Ckpt | Const]:
    """Every checkpoint tensor and constant that `expr` reads, in order, repeats included."""
    if not isinstance(expr, Apply):
        yield expr
        return
    for arg in expr.args:
        yield from leaves(arg)


@dataclass(eq=False)
class Weight:
    """A named tensor of the module, printed `@name`; `type` is its logical, unpacked type."""

    name: str
    type: TensorType
    expr: WeightExpr

    def __repr__(self) -> str:
        return f"<weight @{self.name}: {self.type}>"

"""What a pass is: a frozen dataclass whose fields are its options, from one module to another.

Contract: `run` never changes its argument, is deterministic, and returns a module that verifies.
`requires`, `establishes` and `destroys` are facts (short strings); a pipeline checks them when it
is built. `numerics` says how far a pass may move values and so selects the oracle of its tests.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar, Literal

from ropeway.compiler.ir.graph import Module

Phase = Literal["raise", "cleanup", "fuse", "quantize", "parallel", "lower", "user"]


class Numerics(enum.StrEnum):
    """How a pass may change values, and thereby the oracle of its tests."""

    EXACT = "exact"
    """Bit-equal results in the interpreter."""
    REORDER = "reorder"
    """The same real-valued function: float32 results agree within float32 tolerance."""
    LOSSY = "lossy"
    """Another function, within a bound that the pass states."""


@dataclass(frozen=True)
class NearMiss:
    """A place where a pattern failed: the op, the constraint, and how many constraints held."""

    op: str
    constraint: str
    loc: str = ""
    depth: int = 0

    def __str__(self) -> str:
        where = f" ({self.loc})" if self.loc else ""
        return f"{self.op}{where}: {self.constraint}"


@dataclass(frozen=True)
class PassContext:
    """What a run gives to all its passes. `strict_fusion`: a fusion that matches nothing fails."""

    strict_fusion: bool = False


@dataclass(frozen=True)
class PassResult:
    """The new module, how often the pass matched and where, and where it nearly did."""

    module: Module
    matches: int = 0
    sites: tuple[str, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()

    def nearest_miss(self) -> NearMiss | None:
        """The miss that satisfied most constraints; the first of equals."""
        return max(self.near_misses, key=lambda miss: miss.depth, default=None)


@dataclass(frozen=True)
class Pass:
    """Base of all passes. Subclass as a frozen dataclass, set the class variables, write `run`.

    Options are dataclass fields with defaults, of types bool, int, float, str or tuples of these,
    so that every pass can be written in a spec string.
    """

    name: ClassVar[str]
    phase: ClassVar[Phase] = "user"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    destroys: ClassVar[frozenset[str]] = frozenset()
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        """Return the transformed module; `module` itself stays as it is."""
        raise NotImplementedError(f"pass {type(self).__name__} doesn't define run")

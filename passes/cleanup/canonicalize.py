"""canonicalize: rewrite ops into their one usual spelling, and drop those that change nothing.

Each rule is a function of one op that returns the operand that stands for its result, or None.
Rules run until none applies. All are EXACT, down to the sign of zero (so x + 0 stays: -0 + 0 is 0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from ropeway.compiler.ir.attrs import Attr
from ropeway.compiler.ir.graph import Module, Op, Operand, Value
from ropeway.compiler.ir.rewrite import Rewriter
from ropeway.compiler.ir.types import DType, TensorType
from ropeway.compiler.ir.weights import Weight
from ropeway.compiler.pipeline.base import Numerics, Pass, PassContext, PassResult, Phase
from ropeway.compiler.pipeline.emit import emit
from ropeway.compiler.pipeline.match import describe_op

Rule: TypeAlias = Callable[[Rewriter, Op], Operand | None]

MAX_ROUNDS = 16
COMMUTATIVE = frozenset({"math.add", "math.mul", "math.max", "math.min"})
HALVES = (DType.BF16, DType.F16)


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Identity casts, reshapes, transposes, slices, expands and products go; chains of them become
    one; in commutative ops a value comes before a weight. EXACT."""

    name: ClassVar[str] = "canonicalize"
    phase: ClassVar[Phase] = "cleanup"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        module = module.clone()
        sites: list[str] = []
        for function in module.functions.values():
            rewriter = Rewriter(function, module)
            for _ in range(MAX_ROUNDS):
                before = len(sites)
                for op in list(function.ops):
                    _simplify(rewriter, op, sites)
                if len(sites) == before:
                    break
        return PassResult(module, len(sites), tuple(sites))


def _simplify(rewriter: Rewriter, op: Op, sites: list[str]) -> None:
    if op.name in COMMUTATIVE and len(op.args) == 2 and _weight_first(op):
        value, weight = op.args[1], op.args[0]
        rewriter.set_operand(op, 0, value)
        rewriter.set_operand(op, 1, weight)
        sites.append(describe_op(op))
    if all(rewriter.is_dead(result) for result in op.results):
        return
    for rule in RULES.get(op.name, ()):
        found = rule(rewriter, op)
        if found is None or (isinstance(found, Weight) and rewriter.is_output(op.result)):
            continue
        sites.append(describe_op(op))
        rewriter.replace_op(op, [found])
        return


def _weight_first(op: Op) -> bool:
    return isinstance(op.args[0], Weight) and isinstance(op.args[1], Value)


def _identity(rewriter: Rewriter, op: Op) -> Operand | None:
    """An op that only renames: its result has its operand's type."""
    return op.args[0] if op.args[0].type == op.result.type else None


def _cast_of_widening(rewriter: Rewriter, op: Op) -> Operand | None:
    """cast(cast(x, f32), d) with x in half precision: every half is a float32, so cast(x, d)."""
    inner = _made_by(op.args[0], "tensor.cast")
    if inner is None or _dtype(inner.args[0]) not in HALVES or _dtype(op.args[0]) != DType.F32:
        return None
    if inner.args[0].type == op.result.type:
        return inner.args[0]
    return emit(rewriter, op, op.name, [inner.args[0]], attrs=op.attrs).result


def _reshape_of_reshape(rewriter: Rewriter, op: Op) -> Operand | None:
    inner = _made_by(op.args[0], "tensor.reshape")
    if inner is None:
        return None
    return emit(rewriter, op, op.name, [inner.args[0]], attrs=op.attrs).result


def _identity_transpose(rewriter: Rewriter, op: Op) -> Operand | None:
    perm = _ints(op.attrs["perm"])
    return op.args[0] if perm == tuple(range(len(perm))) else None


def _transpose_of_transpose(rewriter: Rewriter, op: Op) -> Operand | None:
    inner = _made_by(op.args[0], "tensor.transpose")
    if inner is None:
        return None
    first = _ints(inner.attrs["perm"])
    perm = tuple(first[axis] for axis in _ints(op.attrs["perm"]))
    if perm == tuple(range(len(perm))):
        return inner.args[0]
    return emit(rewriter, op, op.name, [inner.args[0]], attrs={"perm": perm}).result


def _slice_of_slice(rewriter: Rewriter, op: Op) -> Operand | None:
    inner = _made_by(op.args[0], "tensor.slice")
    if inner is None or inner.attrs["axis"] != op.attrs["axis"]:
        return None
    bounds = [inner.attrs["start"], op.attrs["start"], op.attrs["stop"]]
    if not all(isinstance(bound, int) for bound in bounds):
        return None
    base, start, stop = _ints(tuple(bounds))
    attrs: Mapping[str, Attr] = {**op.attrs, "start": base + start, "stop": base + stop}
    return emit(rewriter, op, op.name, [inner.args[0]], attrs=attrs).result


def _concat_of_one(rewriter: Rewriter, op: Op) -> Operand | None:
    return op.args[0] if len(op.args) == 1 else None


def _concat_of_all_slices(rewriter: Rewriter, op: Op) -> Operand | None:
    """concat(slice(x, 0, a), slice(x, a, b), ...) along one axis, up to the end: x."""
    parts = [_made_by(operand, "tensor.slice") for operand in op.args]
    first = parts[0]
    if first is None:
        return None
    at: Attr = 0
    for part in parts:
        if part is None or part.args[0] is not first.args[0]:
            return None
        if part.attrs["axis"] != op.attrs["axis"] or part.attrs["start"] != at:
            return None
        at = part.attrs["stop"]
    return first.args[0] if first.args[0].type == op.result.type else None


def _times_one(rewriter: Rewriter, op: Op) -> Operand | None:
    """x * 1, x / 1, x ** 1 and x - 0 are x, bit for bit."""
    if len(op.args) != 1 or op.args[0].type != op.result.type:
        return None
    neutral = 0.0 if op.name == "math.sub" else 1.0
    return op.args[0] if op.attrs.get("scalar") == neutral else None


def _neg_of_neg(rewriter: Rewriter, op: Op) -> Operand | None:
    inner = _made_by(op.args[0], "math.neg")
    return inner.args[0] if inner is not None else None


def _made_by(operand: Operand, name: str) -> Op | None:
    producer = operand.producer if isinstance(operand, Value) else None
    return producer if producer is not None and producer.name == name else None


def _dtype(operand: Operand) -> DType | None:
    return operand.type.dtype if isinstance(operand.type, TensorType) else None


def _ints(attr: Attr) -> tuple[int, ...]:
    return tuple(int(item) for item in attr) if isinstance(attr, tuple) else ()


RULES: Mapping[str, tuple[Rule, ...]] = {
    "tensor.cast": (_identity, _cast_of_widening),
    "tensor.reshape": (_identity, _reshape_of_reshape),
    "tensor.expand": (_identity,),
    "tensor.transpose": (_identity_transpose, _transpose_of_transpose),
    "tensor.slice": (_identity, _slice_of_slice),
    "tensor.concat": (_concat_of_one, _concat_of_all_slices),
    "math.mul": (_times_one,),
    "math.div": (_times_one,),
    "math.pow": (_times_one,),
    "math.sub": (_times_one,),
    "math.neg": (_neg_of_neg,),
}

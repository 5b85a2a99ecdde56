"""raise-rms-norm: the chain of a hand-written RMS norm becomes nn.rms_norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.graph import Op, Operand, Value
from ropeway.compiler.ir.types import DType, TensorType
from ropeway.compiler.ir.weights import Weight
from ropeway.compiler.pipeline.base import Numerics, Phase
from ropeway.compiler.pipeline.emit import emit
from ropeway.compiler.pipeline.match import Attempt
from ropeway.compiler.pipeline.rewrite_pass import RewritePass
from ropeway.passes.raising.chains import erase_dead, last_axis, through_reshape


@dataclass(frozen=True)
class RaiseRmsNorm(RewritePass):
    """x * rsqrt(mean(x^2) + eps) [* gain] -> nn.rms_norm(x, gain). REORDER.

    Taken in where they stand around it: the casts to f32 and back, x / sqrt(...), a power of -0.5,
    and a gain of 1 + g (`offset`). Statistics and gain are then in f32 with one rounding.
    """

    name: ClassVar[str] = "raise-rms-norm"
    phase: ClassVar[Phase] = "raise"
    establishes: ClassVar[frozenset[str]] = frozenset({"norms-raised"})
    numerics: ClassVar[Numerics] = Numerics.REORDER
    anchors: ClassVar[tuple[str, ...]] = ("math.rsqrt", "math.sqrt", "math.pow")

    def rewrite(self, attempt: Attempt, op: Op) -> None:
        m = attempt
        if op.name == "math.pow":
            m.require(op.attrs.get("scalar") == -0.5, "the power is -0.5")
        shifted = m.producer(op.args[0], "what the root is taken of", "math.add")
        eps = shifted.attrs.get("scalar")
        m.require(isinstance(eps, float), "the mean is shifted by a number (eps)", shifted)
        mean = m.producer(shifted.args[0], "the shifted value", "math.mean")
        m.require(last_axis(mean), "the mean is over the last axis", mean)
        x = _squared(m, mean)
        scaled = _scaled(m, op, x)
        chain = [scaled.result]
        gain, offset = _extend(m, chain)
        source = _uncast(x)
        final, normed = _final(m, chain, source, x)
        if final is chain[0] or (len(chain) > 1 and final is chain[1] and _is_cast(chain[1])):
            gain, offset = None, 0.0  # the gain stands after a cast that can't be taken in
        anchor = final.producer or op
        norm = emit(
            m.rewriter,
            anchor,
            "nn.rms_norm",
            [normed],
            kwargs={} if gain is None else {"gain": gain},
            attrs={"eps": float(eps), "offset": offset},  # type: ignore[arg-type]
            loc=op.loc,
            names=[_norm_name(final)],
        )
        m.rewriter.replace(final, norm.result)
        erase_dead(m.rewriter, anchor)


def _squared(m: Attempt, mean: Op) -> Value:
    square = m.producer(mean.args[0], "what is averaged", "math.pow", "math.mul")
    if square.name == "math.pow":
        m.require(square.attrs.get("scalar") == 2.0, "the averaged power is 2", square)
    else:
        m.require(
            len(square.args) == 2 and square.args[0] is square.args[1],
            "what is averaged is a value times itself",
            square,
        )
    return m.value(square.args[0], "the squared value")


def _scaled(m: Attempt, root: Op, x: Value) -> Op:
    """The op that multiplies x by the root's inverse."""
    users = through_reshape(m.rewriter, root.result)
    wanted = "math.div" if root.name == "math.sqrt" else "math.mul"
    for user in users:
        operands = user.args[:1] if wanted == "math.div" else user.args
        if user.name == wanted and len(user.args) == 2 and any(a is x for a in operands):
            return user
    m.fail(f"x is scaled by the root ({wanted})", root)


def _extend(m: Attempt, chain: list[Value]) -> tuple[Operand | None, float]:
    """Follows casts and one product with a gain; returns the gain and its offset."""
    gain: Operand | None = None
    offset = 0.0
    while True:
        user = m.rewriter.single_user(chain[-1])
        if user is not None and user.name == "tensor.cast":
            chain.append(user.result)
            continue
        if gain is None and user is not None and user.name == "math.mul" and len(user.args) == 2:
            other = user.args[1] if user.args[0] is chain[-1] else user.args[0]
            gain, offset = _gain(other, chain[-1])
            if gain is not None:
                chain.append(user.result)
                continue
        return gain, offset


def _gain(operand: Operand, normed: Value) -> tuple[Operand | None, float]:
    offset = 0.0
    if isinstance(operand, Value) and operand.producer is not None:
        add = operand.producer
        if add.name != "math.add" or "scalar" not in add.attrs:
            return None, 0.0
        operand, offset = add.args[0], float(add.attrs["scalar"])  # type: ignore[arg-type]
    kind, normed_kind = operand.type, normed.type
    assert isinstance(normed_kind, TensorType)
    fits = isinstance(operand, Weight) and operand.type.shape == normed_kind.shape[-1:]
    return (operand, offset) if fits and isinstance(kind, TensorType) else (None, 0.0)


def _final(m: Attempt, chain: list[Value], source: Value, x: Value) -> tuple[Value, Value]:
    """The last value of the chain that a norm of `source`, else of `x`, can replace."""
    for normed in (source, x):
        for value in reversed(chain):
            if value.type == normed.type:
                return value, normed
    m.fail("the normed value has the dtype of what is normed")


def _uncast(x: Value) -> Value:
    op = x.producer
    if op is None or op.name != "tensor.cast" or not isinstance(op.args[0], Value):
        return x
    inner = op.args[0].type
    narrow = isinstance(inner, TensorType) and inner.dtype in (DType.BF16, DType.F16)
    return op.args[0] if narrow else x


def _is_cast(value: Value) -> bool:
    return value.producer is not None and value.producer.name == "tensor.cast"


def _norm_name(value: Value) -> str:
    return value.name.rpartition(".")[0] or "norm"

"""fuse-gate-up: the gate and up projections of a gated MLP become one GEMM, sliced afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.graph import Op, Operand, Value
from ropeway.compiler.pipeline.base import Numerics, Phase
from ropeway.compiler.pipeline.match import Attempt
from ropeway.compiler.pipeline.rewrite_pass import RewritePass
from ropeway.passes.fusion.linears import merge_linears, require_mergeable

ACTIVATIONS = ("nn.silu", "nn.gelu", "nn.relu", "nn.tanh", "nn.sigmoid")


@dataclass(frozen=True)
class FuseGateUp(RewritePass):
    """act(nn.linear(x)) * nn.linear(x) -> one nn.linear, gate rows first. REORDER as fuse-qkv."""

    name: ClassVar[str] = "fuse-gate-up"
    phase: ClassVar[Phase] = "fuse"
    establishes: ClassVar[frozenset[str]] = frozenset({"gate-up-fused"})
    numerics: ClassVar[Numerics] = Numerics.REORDER
    anchors: ClassVar[tuple[str, ...]] = ("math.mul",)

    def rewrite(self, attempt: Attempt, op: Op) -> None:
        activation, other = match_gate(attempt, op)
        linears = [
            _projection(attempt, activation.args[0], "gate"),
            _projection(attempt, other, "up"),
        ]
        require_mergeable(attempt, linears, "gate and up")
        merge_linears(attempt, linears, "gate_up")


def match_gate(m: Attempt, op: Op) -> tuple[Op, Operand]:
    """The activation op and the other factor of a gated product, whichever side each is on."""
    m.require(len(op.args) == 2, "the product of two values, not of a value and a number")
    for gate, other in (op.args, op.args[::-1]):
        made = gate.producer if isinstance(gate, Value) else None
        if made is not None and made.name in ACTIVATIONS:
            m.require(True, "one factor is an activation")
            return made, other
    m.fail("one factor must come from an activation (" + ", ".join(ACTIVATIONS) + ")")


def _projection(m: Attempt, operand: Operand, what: str) -> Op:
    """The linear behind a factor; a slice of one is named by `require_mergeable`."""
    if isinstance(operand, Value) and operand.producer and operand.producer.name == "tensor.slice":
        operand = operand.producer.args[0]
    return m.producer(operand, what, "nn.linear")

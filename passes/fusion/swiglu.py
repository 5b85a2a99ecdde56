"""fuse-swiglu: activation(gate) * up over the two halves of one matrix becomes nn.glu.

Takes what fuse-gate-up leaves and equally a projection that the checkpoint already holds merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.dims import same
from ropeway.compiler.ir.graph import Op
from ropeway.compiler.ir.types import TensorType, Type
from ropeway.compiler.ops.registry import attr
from ropeway.compiler.pipeline.base import Numerics, Phase
from ropeway.compiler.pipeline.emit import emit
from ropeway.compiler.pipeline.match import Attempt
from ropeway.compiler.pipeline.rewrite_pass import RewritePass
from ropeway.passes.fusion.gate_up import match_gate


@dataclass(frozen=True)
class FuseSwiglu(RewritePass):
    """act(slice(x, first half)) * slice(x, second half) -> nn.glu(x) {act}.

    EXACT: nn.glu rounds the activation to the dtype before the product, as the ops apart do.
    """

    name: ClassVar[str] = "fuse-swiglu"
    phase: ClassVar[Phase] = "fuse"
    requires: ClassVar[frozenset[str]] = frozenset({"gate-up-fused"})
    establishes: ClassVar[frozenset[str]] = frozenset({"glu-fused"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    anchors: ClassVar[tuple[str, ...]] = ("math.mul",)

    def rewrite(self, attempt: Attempt, op: Op) -> None:
        m = attempt
        activation, other = match_gate(m, op)
        gate = m.producer(activation.args[0], "gate", "tensor.slice")
        up = m.producer(other, "up", "tensor.slice")
        m.require(gate.args[0] is up.args[0], "gate and up are slices of one value", up)
        whole = m.value(gate.args[0], "the sliced value")
        act = _act(activation)
        m.require(act is not None, f"nn.glu has no activation {activation.name}", activation)
        _require_halves(m, gate, up, whole.type)
        m.sole_user(activation.result, "the activated gate")
        fused = emit(m.rewriter, op, "nn.glu", [whole], attrs={"act": act or ""}, names=["glu"])
        m.rewriter.replace(op.result, fused.result)
        for gone in (op, activation, gate, up):
            if m.rewriter.is_dead(gone.result):
                m.rewriter.erase(gone)


def _require_halves(m: Attempt, gate: Op, up: Op, whole: Type) -> None:
    columns = whole.shape[-1] if isinstance(whole, TensorType) and whole.rank == 2 else None
    for part in (gate, up):
        fits = columns is not None and attr(part, "axis") in (1, -1)
        m.require(fits, "gate and up are sliced along the columns of a matrix", part)
    middle = gate.attrs["stop"]
    halves = columns is not None and isinstance(middle, int) and same(2 * middle, columns)
    m.require(
        halves and attr(gate, "start") == 0, "the gate is the first half of the columns", gate
    )
    m.require(
        attr(up, "start") == middle and up.attrs["stop"] == columns,
        "up is the second half of the columns",
        up,
    )


def _act(op: Op) -> str | None:
    if op.name == "nn.silu":
        return "silu"
    if op.name == "nn.gelu":
        return "gelu_tanh" if attr(op, "approximate") == "tanh" else "gelu"
    return None

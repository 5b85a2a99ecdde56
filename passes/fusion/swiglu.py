"""fuse-swiglu: activation(gate) * up over the two halves of one matrix becomes nn.glu.

Takes what fuse-gate-up leaves and equally a projection that the checkpoint already holds merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.dims import same
from ropeway.compiler.ir.graph import Op
from ropeway.compiler.ir.types import TensorType
from ropeway.compiler.pipeline.base import Numerics, Phase
from ropeway.compiler.pipeline.emit import emit
from ropeway.compiler.pipeline.match import Attempt
from ropeway.compiler.pipeline.rewrite_pass import RewritePass
from ropeway.passes.fusion.gate_up import match_gate


@dataclass(frozen=True)
class FuseSwiglu(RewritePass):
    """act(slice(x, first half)) * slice(x, second half) -> nn.glu(x) {act}.

    REORDER: in bf16 the activation isn't rounded before the product; in f32 it is the same.
    """

    name: ClassVar[str] = "fuse-swiglu"
    phase: ClassVar[Phase] = "fuse"
    requires: ClassVar[frozenset[str]] = frozenset({"gate-up-fused"})
    establishes: ClassVar[frozenset[str]] = frozenset({"glu-fused"})
    numerics: ClassVar[Numerics] = Numerics.REORDER
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
        fused = emit(m.rewriter, op, "nn.glu", [whole], attrs={"act": act or ""})
        m.rewriter.replace(op.result, fused.result)
        for gone in (op, activation, gate, up):
            if m.rewriter.is_dead(gone.result):
                m.rewriter.erase(gone)


def _require_halves(m: Attempt, gate: Op, up: Op, whole: object) -> None:
    if not isinstance(whole, TensorType):
        m.fail("the sliced value is a tensor", gate)
    last = whole.rank - 1
    size = whole.shape[last]
    for part in (gate, up):
        axis = int(part.attrs["axis"])
        m.require(axis % whole.rank == last and whole.rank == 2, "sliced along the columns", part)
    m.require(
        gate.attrs["start"] == 0 and same(gate.attrs["stop"] * 2, size),
        "the gate is the first half of the columns",
        gate,
    )
    m.require(
        up.attrs["start"] == gate.attrs["stop"] and same(up.attrs["stop"], size),
        "up is the second half of the columns",
        up,
    )


def _act(op: Op) -> str | None:
    if op.name == "nn.silu":
        return "silu"
    if op.name == "nn.gelu":
        return "gelu_tanh" if op.attrs.get("approximate") == "tanh" else "gelu"
    return None

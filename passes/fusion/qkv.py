"""fuse-qkv: the q, k and v projections of one attention become one GEMM, sliced afterwards.

q, k and v are found from nn.sdpa backwards, through what may lie between (head reshapes, rope,
q/k norms, casts, scaling), so that names and order in the model don't matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.graph import Op, Operand, Value
from ropeway.compiler.pipeline.base import Numerics, Phase
from ropeway.compiler.pipeline.match import Attempt
from ropeway.compiler.pipeline.rewrite_pass import RewritePass
from ropeway.passes.fusion.linears import merge_linears, require_mergeable

BETWEEN = frozenset(
    {
        "tensor.reshape",
        "tensor.transpose",
        "tensor.slice",
        "tensor.cast",
        "nn.rope",
        "nn.rms_norm",
        "nn.layer_norm",
        "math.mul",
        "math.div",
    }
)


@dataclass(frozen=True)
class FuseQkv(RewritePass):
    """nn.linear x 3 on one input -> nn.linear + tensor.slice x 3.

    REORDER: each output element is the same dot product, but a GEMM library may block a wider
    matrix otherwise.
    """

    name: ClassVar[str] = "fuse-qkv"
    phase: ClassVar[Phase] = "fuse"
    requires: ClassVar[frozenset[str]] = frozenset({"one-sequence"})
    establishes: ClassVar[frozenset[str]] = frozenset({"qkv-fused"})
    numerics: ClassVar[Numerics] = Numerics.REORDER
    anchors: ClassVar[tuple[str, ...]] = ("nn.sdpa",)

    def rewrite(self, attempt: Attempt, op: Op) -> None:
        linears = [
            _projection(attempt, operand, what)
            for operand, what in zip(op.args, ("q", "k", "v"), strict=True)
        ]
        require_mergeable(attempt, linears, "q, k and v")
        merge_linears(attempt, linears, "qkv")


def _projection(m: Attempt, operand: Operand, what: str) -> Op:
    while isinstance(operand, Value) and operand.producer and operand.producer.name in BETWEEN:
        operand = operand.producer.args[0]
    return m.producer(operand, what, "nn.linear")

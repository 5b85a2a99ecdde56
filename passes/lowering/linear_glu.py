"""fuse-linear-glu: a gated unit moves into the epilogue of the GEMM that makes gates and ups.

For targets whose GEMM can: its weight is then packed with gates beside ups (pack-weights), so that
a tile of the product holds both, and the matrix between the two ops is never written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.graph import Op
from ropeway.compiler.ir.types import DType, TensorType
from ropeway.compiler.pipeline.base import Numerics, Phase
from ropeway.compiler.pipeline.emit import emit
from ropeway.compiler.pipeline.match import Attempt
from ropeway.compiler.pipeline.rewrite_pass import RewritePass

FUSED = {
    "nn.linear": "nn.linear_glu",
    "nn.rms_norm_linear": "nn.rms_norm_linear_glu",
    "nn.add_rms_norm_linear": "nn.add_rms_norm_linear_glu",
}
GROUP = 16
"""Gates that lie together in a packed panel, before as many ups."""


@dataclass(frozen=True)
class FuseLinearGlu(RewritePass):
    """nn.glu(nn.linear(x)) -> nn.linear_glu(x) {act}, and likewise behind a norm.

    EXACT: the fused op rounds gates and ups to the activation dtype, as the ops apart do.
    """

    name: ClassVar[str] = "fuse-linear-glu"
    phase: ClassVar[Phase] = "lower"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    anchors: ClassVar[tuple[str, ...]] = ("nn.glu",)

    def rewrite(self, attempt: Attempt, op: Op) -> None:
        m = attempt
        linear = m.producer(op.args[0], "gate_up", *FUSED)
        m.require(linear.results[0] is op.args[0], "gate_up is the linear's result", linear)
        m.sole_user(linear.results[0], "gate_up")
        matrix = m.weight(linear.args[-1], "the matrix")
        m.require(_dtype(op) is matrix.type.dtype, "gate_up isn't widened", linear)
        m.require(len(m.rewriter.uses(matrix)) == 1, "nobody else reads the matrix", linear)
        rows = matrix.type.shape[0]
        m.require(
            isinstance(rows, int) and rows % (2 * GROUP) == 0,
            f"gates come in groups of {GROUP}",
            linear,
        )
        attrs = {name: value for name, value in linear.attrs.items() if name != "out"}
        fused = emit(
            m.rewriter,
            linear,
            FUSED[linear.name],
            linear.args,
            kwargs=linear.kwargs,
            attrs={**attrs, **op.attrs},
            loc=linear.loc,
            names=[op.result.name, "sum"],
        )
        m.rewriter.replace(op.result, fused.results[0])
        if len(linear.results) == 2:
            m.rewriter.replace(linear.results[1], fused.results[1])
        m.rewriter.erase(op)
        m.rewriter.erase(linear)


def _dtype(op: Op) -> DType | None:
    kind = op.result.type
    return kind.dtype if isinstance(kind, TensorType) else None

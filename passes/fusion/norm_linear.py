"""fuse-norm-linear: an RMS norm whose only reader is a GEMM moves into the packing of its input.

The gain is applied while the GEMM packs its input rows. It is never folded into the weights: in
bf16 that would round them again, and it would untie a head that shares the embedding's matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.graph import Op
from ropeway.compiler.pipeline.base import Numerics, Phase
from ropeway.compiler.pipeline.emit import emit
from ropeway.compiler.pipeline.match import Attempt
from ropeway.compiler.pipeline.rewrite_pass import RewritePass

FUSED = {"nn.rms_norm": "nn.rms_norm_linear", "nn.add_rms_norm": "nn.add_rms_norm_linear"}


@dataclass(frozen=True)
class FuseNormLinear(RewritePass):
    """nn.linear(nn.rms_norm(x)) -> nn.rms_norm_linear(x), and likewise for nn.add_rms_norm.

    EXACT: the fused op rounds the normed row to the activation dtype, as the ops apart do.
    """

    name: ClassVar[str] = "fuse-norm-linear"
    phase: ClassVar[Phase] = "fuse"
    requires: ClassVar[frozenset[str]] = frozenset({"qkv-fused", "gate-up-fused", "add-norm-fused"})
    establishes: ClassVar[frozenset[str]] = frozenset({"norm-linear-fused"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    anchors: ClassVar[tuple[str, ...]] = ("nn.rms_norm", "nn.add_rms_norm", "nn.layer_norm")

    def rewrite(self, attempt: Attempt, op: Op) -> None:
        m = attempt
        linear = m.sole_user(op.results[0], "the normed value")
        m.require(
            linear.name == "nn.linear" and linear.args[0] is op.results[0],
            f"the normed value is the input of an nn.linear, not of {linear.name}",
            linear,
        )
        m.require(op.name in FUSED, "an RMS norm: layer norms have no fused kernel")
        m.require("gain" in op.kwargs, "the norm has a gain")
        gain = m.weight(op.kwargs["gain"], "the gain")
        matrix = m.weight(linear.args[1], "the matrix")
        fused = emit(
            m.rewriter,
            op,
            FUSED[op.name],
            [*op.args, gain, matrix],
            kwargs=linear.kwargs,
            attrs={**op.attrs, **linear.attrs},
            loc=linear.loc,
            names=[linear.result.name, "sum"],
        )
        m.rewriter.replace(linear.result, fused.results[0])
        if len(op.results) == 2:
            m.rewriter.replace(op.results[1], fused.results[1])
        m.rewriter.erase(linear)
        m.rewriter.erase(op)

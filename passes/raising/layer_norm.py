"""raise-layer-norm: an RMS norm of a centred value becomes nn.layer_norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.graph import Op, Value
from ropeway.compiler.ir.types import TensorType
from ropeway.compiler.pipeline.base import Numerics, Phase
from ropeway.compiler.pipeline.emit import emit
from ropeway.compiler.pipeline.match import Attempt
from ropeway.compiler.pipeline.rewrite_pass import RewritePass
from ropeway.passes.raising.chains import behind_reshape, erase_dead, last_axis


@dataclass(frozen=True)
class RaiseLayerNorm(RewritePass):
    """nn.rms_norm(x - mean(x), gain) -> nn.layer_norm(x, gain). REORDER.

    A cast of x to f32 and back is taken in. Needs raise-rms-norm before it.
    """

    name: ClassVar[str] = "raise-layer-norm"
    phase: ClassVar[Phase] = "raise"
    requires: ClassVar[frozenset[str]] = frozenset({"norms-raised"})
    numerics: ClassVar[Numerics] = Numerics.REORDER
    anchors: ClassVar[tuple[str, ...]] = ("nn.rms_norm",)

    def rewrite(self, attempt: Attempt, op: Op) -> None:
        m = attempt
        centred = m.producer(op.args[0], "what is normed", "math.sub")
        m.require(len(centred.args) == 2, "a value is subtracted, not a number", centred)
        x = m.value(centred.args[0], "the centred value")
        mean = m.producer(behind_reshape(centred.args[1]), "what is subtracted", "math.mean")
        m.require(mean.args[0] is x and last_axis(mean), "it is x's mean over the last axis", mean)
        m.require(op.attrs["offset"] == 0.0, "the gain has no offset")
        source, final = x, op.result
        cast, user = x.producer, m.rewriter.single_user(op.result)
        if cast is not None and cast.name == "tensor.cast" and user is not None:
            narrow = cast.args[0]
            if user.name == "tensor.cast" and isinstance(narrow, Value):
                kind = narrow.type
                if isinstance(kind, TensorType) and kind == user.result.type:
                    source, final = narrow, user.result
        anchor = final.producer or op
        norm = emit(
            m.rewriter,
            anchor,
            "nn.layer_norm",
            [source],
            kwargs=dict(op.kwargs),
            attrs={"eps": op.attrs["eps"]},
            loc=op.loc,
            names=[op.result.name],
        )
        m.rewriter.replace(final, norm.result)
        erase_dead(m.rewriter, anchor)

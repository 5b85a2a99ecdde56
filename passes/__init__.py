"""The passes, and the pipeline as one literal list.

`given` of the default pipeline is what the importer promises: attention is nn.sdpa over one
sequence ("one-sequence"), and the logits have one row for each of its T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from ropeway.compiler.pipeline.base import Pass
from ropeway.compiler.pipeline.pipeline import Pipeline
from ropeway.passes.cleanup.canonicalize import Canonicalize
from ropeway.passes.cleanup.cse import Cse
from ropeway.passes.cleanup.dce import Dce
from ropeway.passes.cleanup.fold import Fold
from ropeway.passes.fusion.add_norm import FuseAddNorm
from ropeway.passes.fusion.attention import FuseAttention
from ropeway.passes.fusion.gate_up import FuseGateUp
from ropeway.passes.fusion.lm_head import LowerLmHead
from ropeway.passes.fusion.norm_linear import FuseNormLinear
from ropeway.passes.fusion.qkv import FuseQkv
from ropeway.passes.fusion.rope import FuseRope
from ropeway.passes.fusion.swiglu import FuseSwiglu
from ropeway.passes.lowering.legalize import Legalize
from ropeway.passes.lowering.linear_glu import FuseLinearGlu
from ropeway.passes.lowering.pack_weights import PackWeights
from ropeway.passes.lowering.specialize import Specialize
from ropeway.passes.raising.gelu import RaiseGelu
from ropeway.passes.raising.gqa import RaiseGqa
from ropeway.passes.raising.layer_norm import RaiseLayerNorm
from ropeway.passes.raising.rms_norm import RaiseRmsNorm
from ropeway.passes.raising.rope import RaiseRope

GIVEN = frozenset({"one-sequence"})


def default_pipeline() -> Pipeline:
    """From an imported module to a fused step function, for any target; lowering comes after."""
    return Pipeline(
        [
            # Raising reads structures as models spell them; canonicalize would merge reshapes
            # across their borders, so it comes after. CSE first: models spell x - mean twice.
            Cse(),
            Dce(),
            RaiseRmsNorm(),
            RaiseLayerNorm(),
            RaiseRope(),
            RaiseGqa(),
            RaiseGelu(),
            Canonicalize(),
            Fold(),
            Cse(),
            Dce(),
            FuseQkv(),
            FuseGateUp(),
            FuseSwiglu(),
            FuseAddNorm(),
            FuseNormLinear(),
            FuseRope(),
            FuseAttention(),
            LowerLmHead(),
            Canonicalize(),
            Dce(),
        ],
        given=GIVEN,
    )


CATALOGUE: Mapping[str, type[Pass]] = {
    kind.name: kind
    for kind in (
        Canonicalize,
        Fold,
        Cse,
        Dce,
        RaiseRmsNorm,
        RaiseLayerNorm,
        RaiseRope,
        RaiseGqa,
        RaiseGelu,
        FuseQkv,
        FuseGateUp,
        FuseSwiglu,
        FuseAddNorm,
        FuseNormLinear,
        FuseRope,
        FuseAttention,
        LowerLmHead,
        FuseLinearGlu,
        Legalize,
        PackWeights,
        Specialize,
    )
}
"""Every pass that a spec string may name."""

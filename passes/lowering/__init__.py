"""From a fused function to what a target lowers: legalize, then the layout of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ropeway.compiler.pipeline.base import Pass
from ropeway.compiler.pipeline.pipeline import Pipeline
from ropeway.passes.lowering.legalize import Legalize
from ropeway.passes.lowering.linear_glu import FUSED, FuseLinearGlu
from ropeway.passes.lowering.pack_weights import PackWeights

if TYPE_CHECKING:
    from ropeway.compiler.targets.base import Target


def lowering_pipeline(target: Target) -> Pipeline:
    """The passes between the last fusion and `target.lower`."""
    capabilities = target.capabilities()
    if capabilities.weight_layout == "rows":
        return Pipeline([Legalize(target=target.name)])
    fusions: list[Pass] = [FuseLinearGlu()] if capabilities.ops.issuperset(FUSED.values()) else []
    return Pipeline(
        [
            *fusions,
            Legalize(target=target.name),
            PackWeights(layout=capabilities.weight_layout),
        ]
    )

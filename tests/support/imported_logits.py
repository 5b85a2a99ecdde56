"""Logits of an imported program through the interpreter, raw and after raising."""

import torch

from ropeway.compiler.frontend.imported import Imported
from ropeway.compiler.ir.graph import Module
from ropeway.compiler.ops.interpreter import run
from ropeway.compiler.pipeline.pipeline import Pipeline
from ropeway.compiler.pipeline.report import Report
from ropeway.passes import GIVEN
from ropeway.passes.cleanup.cse import Cse
from ropeway.passes.cleanup.dce import Dce
from ropeway.passes.raising.gelu import RaiseGelu
from ropeway.passes.raising.gqa import RaiseGqa
from ropeway.passes.raising.layer_norm import RaiseLayerNorm
from ropeway.passes.raising.rms_norm import RaiseRmsNorm
from ropeway.passes.raising.rope import RaiseRope

RAISING = (RaiseRmsNorm, RaiseLayerNorm, RaiseRope, RaiseGqa, RaiseGelu)


def raise_module(module: Module) -> tuple[Module, Report]:
    """The raising passes as the default pipeline orders them, every pass verified."""
    passes = [Cse(), Dce(), *(kind() for kind in RAISING), Dce()]
    return Pipeline(passes, given=GIVEN).run(module, verify_each=True)


def module_logits(imported: Imported, module: Module, ids: torch.Tensor) -> torch.Tensor:
    """f32[T, V] of one sequence from position 0."""
    positions = torch.arange(len(ids), dtype=torch.int32)
    inputs = {"ids": ids, "positions": positions}
    out = run(module, module.fn, inputs, imported.source, {}, constants=imported.constants)
    return out["logits"].float()

"""Bisect names the planted pass, wherever it is planted and whatever it breaks."""

from __future__ import annotations

import pytest
from support.decoder_text import Shape, decoder_text
from support.user_passes import Crash, ScaleLogits, SwapOperands

from ropeway.compiler.errors import RunError, VerifyError
from ropeway.compiler.ir.weights import Ckpt
from ropeway.compiler.ops.text import read_module
from ropeway.compiler.pipeline.bisect import bisect
from ropeway.compiler.pipeline.probe import Probe
from ropeway.passes import default_pipeline


def _place(pipeline, name):
    return [item.name for item in pipeline].index(name) + 1


def test_the_default_pipeline_is_sound(module):
    verdict = bisect(default_pipeline(), module)
    assert verdict.number is None
    assert str(verdict).startswith("no pass breaks the module")


@pytest.mark.parametrize("behind", ["canonicalize", "fuse-gate-up", "fuse-attention", "dce"])
def test_a_pass_that_breaks_the_numerics_is_found(module, behind):
    pipeline = default_pipeline().insert_before(behind, ScaleLogits())
    verdict = bisect(pipeline, module)
    place = _place(pipeline, "scale-logits")
    assert (verdict.number, verdict.kind, verdict.spec) == (place, "numerics", "scale-logits")
    assert "logits are off by" in verdict.detail
    assert verdict.compared <= 6  # of 23 states


@pytest.mark.parametrize(
    ("bad", "kind", "detail"),
    [
        (SwapOperands(), "verification", "tensor.reshape"),
        (Crash(), "error", "KeyError: 'weights'"),
    ],
)
def test_a_pass_that_breaks_the_module_is_found(module, bad, kind, detail):
    pipeline = default_pipeline().insert_after("fuse-qkv", bad)
    verdict = bisect(pipeline, module)
    assert (verdict.number, verdict.kind) == (_place(pipeline, bad.name), kind)
    assert detail in verdict.detail


def test_the_first_of_two_faults_is_named(module):
    pipeline = default_pipeline().insert_after("fuse-qkv", ScaleLogits())
    verdict = bisect(pipeline.insert_after("fuse-rope", Crash()), module)
    assert (verdict.number, verdict.kind) == (_place(pipeline, "scale-logits"), "numerics")


def test_a_bad_input_is_refused(module):
    broken = SwapOperands().run(module, None).module
    with pytest.raises(VerifyError):
        bisect(default_pipeline(), broken)


def test_a_dropped_bias_is_seen():
    """The probe's biases are far from 0, so that a fusion that loses one can't pass."""
    module = read_module(decoder_text(Shape(layers=1, bias="q")))
    without = module.clone()
    linear = next(op for op in without.fn.ops if "bias" in op.kwargs)
    del linear.kwargs["bias"]
    assert Probe(module).error(without) > 0.01


def test_a_weight_from_elsewhere_is_refused(module):
    other = module.clone()
    weight = next(iter(other.weights.values()))
    weight.expr = Ckpt("another")
    with pytest.raises(RunError, match='reads ckpt "another", which the starting module doesn\'t'):
        Probe(module).error(other)

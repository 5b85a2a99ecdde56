"""legalize, pack-weights and specialize: refusals by name and line, equal results around them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cpu_programs import FAST, random_tensors
from support.decoder_text import decoder_text

from ropeway.compiler.errors import PipelineError, TargetError
from ropeway.compiler.ir.printer import print_module
from ropeway.compiler.ops.interpreter import run
from ropeway.compiler.ops.text import read_module
from ropeway.compiler.ops.verifier import verify
from ropeway.compiler.pipeline.base import PassContext
from ropeway.compiler.targets.base import activate
from ropeway.passes.lowering import lowering_pipeline
from ropeway.passes.lowering.legalize import Legalize
from ropeway.passes.lowering.pack_weights import PackWeights
from ropeway.passes.lowering.specialize import Specialize

INPUTS = {
    "ids": torch.tensor([3, 1, 7, 7], dtype=torch.int32),
    "positions": torch.arange(4, dtype=torch.int32),
}


def logits(module, tensors) -> torch.Tensor:
    return run(module, "step", INPUTS, tensors)["logits"]


@pytest.mark.parametrize("item", [PackWeights(), Specialize(tokens=4)], ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_interpreter_gives_the_same_bits_before_and_after(item, dtype):
    module = read_module(decoder_text(replace(FAST, dtype=dtype, qk_norm=True)))
    tensors = random_tensors(module, 3)
    result = item.run(module, PassContext())
    verify(result.module)
    assert result.matches > 0
    assert torch.equal(logits(result.module, tensors), logits(module, tensors))


def test_specialize_leaves_no_symbol_of_the_substituted_dim():
    module = read_module(decoder_text(FAST))
    text = print_module(Specialize(tokens=4).run(module, PassContext()).module)
    assert "[T" not in text and "T in" not in text


def test_specialize_refuses_a_size_outside_the_dims_range():
    module = read_module(decoder_text(FAST))
    with pytest.raises(PipelineError, match=f"T = 161 is outside 1..{FAST.positions}"):
        Specialize(tokens=161).run(module, PassContext())


def test_legalize_refuses_an_op_by_name_line_and_next_step():
    module = read_module(decoder_text(FAST))
    with pytest.raises(TargetError) as caught:
        Legalize(target="cpu").run(module, PassContext())
    text = str(caught.value)
    assert "target cpu has no nn.sdpa at m.py:18" in text
    assert "run the pass fuse-attention" in text and "target reference" in text


def test_legalize_refuses_half_precision_by_value_name():
    text = decoder_text(FAST).replace("f32[", "f16[")
    text = text.replace("@rope : f16[160, 16]", "@rope : f32[160, 16]")
    module = read_module(text)
    with pytest.raises(TargetError, match="f16, it has bf16, f32: compile with bfloat16"):
        Legalize(target="cpu").run(module, PassContext())


def test_the_reference_target_packs_nothing():
    assert lowering_pipeline(activate("reference").target).spec == 'legalize{target="reference"}'
    assert len(lowering_pipeline(activate("cpu").target)) == 3

"""Every pass, before and after, on random weights in memory filled with NaN.

The class of the pass selects the oracle: EXACT is equal bits, REORDER float32 tolerance.
"""

from __future__ import annotations

import pytest
import torch
from support.decoder_text import Shape, decoder_text

from ropeway.compiler.ir.parser import parse_module
from ropeway.compiler.ir.printer import print_module
from ropeway.compiler.ops.interpreter import Interpreter
from ropeway.compiler.ops.text import read_module
from ropeway.compiler.pipeline.base import Numerics, PassContext
from ropeway.compiler.pipeline.pipeline import Pipeline
from ropeway.compiler.pipeline.probe import Probe
from ropeway.passes import CATALOGUE
from ropeway.passes.fusion.attention import FuseAttention
from ropeway.passes.fusion.lm_head import LowerLmHead

FUSIONS = Pipeline.parse(
    "canonicalize,fold,cse,dce,fuse-qkv,fuse-gate-up,fuse-swiglu,fuse-add-norm,fuse-norm-linear,"
    "fuse-rope,fuse-attention{block-size=4},lower-lm-head,canonicalize,dce",
    CATALOGUE,
)
ZOO = {
    "llama": Shape(),
    "llama-untied": Shape(tied=False),
    "one-layer": Shape(layers=1),
    "no-layer": Shape(layers=0),
    "qwen2-biases": Shape(bias="qkv"),
    "every-bias": Shape(bias="qkvogudh", tied=False),
    "some-biases": Shape(bias="qvg"),
    "qwen3-qk-norm": Shape(qk_norm=True, head_dim=10),
    "multi-query": Shape(kv_heads=1),
    "no-gqa": Shape(kv_heads=4),
    "mistral-window": Shape(windows=(3, 3)),
    "gemma-mixed-windows": Shape(layers=3, windows=(3, 0, 3), act="nn.gelu", post_norm=True),
    "phi3-merged": Shape(merged_qkv=True, merged_gate_up=True),
    "neox-parallel": Shape(parallel=True, norm="layer", bias="qkvogudh", act="nn.gelu"),
    "parallel-rms": Shape(parallel=True),
    "layer-norm": Shape(norm="layer"),
    "relu-gate": Shape(act="nn.relu"),
    "no-rope": Shape(rope=False),
    "bf16": Shape(dtype="bf16", bias="qkv", qk_norm=True),
    "bf16-untied": Shape(dtype="bf16", tied=False, windows=(0, 4)),
}


def _limit(item, probe):
    return 0.0 if item.numerics is Numerics.EXACT else probe.tolerance


def test_golden_computes_the_same(golden):
    module = read_module(golden.text)
    for item in Pipeline.parse(golden.spec, CATALOGUE):
        probe = Probe(module, tokens=golden.tokens)
        module = item.run(module, PassContext()).module
        assert probe.error(module) <= _limit(item, probe)


@pytest.mark.parametrize("name", ZOO)
def test_each_pass_computes_the_same_and_prints_back(name):
    module = read_module(decoder_text(ZOO[name]))
    for item in FUSIONS:
        probe = Probe(module, tokens=9)
        module = item.run(module, PassContext()).module
        assert probe.error(module) <= _limit(item, probe), item.name
        assert parse_module(print_module(module)) == module


@pytest.mark.parametrize("name", ZOO)
def test_the_whole_pipeline_in_chunks_over_a_scrambled_cache(name):
    module = read_module(decoder_text(ZOO[name]))
    result, _ = FUSIONS.run(module, verify_each=True)
    probe = Probe(module, tokens=11)
    assert all(torch.isfinite(output).all() for output in probe.reference)
    for chunks in [(11,), (1,) * 11, (7, 4), (4, 4, 3), (5, 1, 5)]:
        assert probe.error(result, chunks=chunks) < probe.tolerance, chunks


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("window", [0, 1, 5])
def test_paged_attention_is_sdpa_for_every_head_size(head_dim, window):
    text = f"""
    module @m format 1 {{
      dims {{ T in 1..64 }}
      func @f(%q: f32[T, 4, {head_dim}], %k: f32[T, 2, {head_dim}], %v: f32[T, 2, {head_dim}])
          -> f32[T, 4, {head_dim}] {{
        %o = nn.sdpa(%q, %k, %v) {{scale = {head_dim**-0.5!r}, window = {window}}}
            : f32[T, 4, {head_dim}]
        return %o
      }}
    }}"""
    module = read_module(text)
    paged = FuseAttention(block_size=4).run(module, PassContext()).module
    probe = Probe(module, tokens=11)
    for chunks in [(11,), (1,) * 11, (6, 5)]:
        assert probe.error(paged, chunks=chunks) < 1e-5


def test_window_counts_the_token_itself():
    """Window 1 sees only the token itself: the attention returns v."""
    text = """
    module @m format 1 {
      dims { T in 1..64 }
      func @f(%q: f32[T, 2, 8], %v: f32[T, 2, 8]) -> f32[T, 2, 8] {
        %o = nn.sdpa(%q, %q, %v) {scale = 1.0, window = 1} : f32[T, 2, 8]
        return %o
      }
    }"""
    module = FuseAttention(block_size=4).run(read_module(text), PassContext()).module
    probe = Probe(module, tokens=7)
    inputs = probe.outputs(read_module(text.replace("return %o", "return %v")))
    assert torch.equal(probe.outputs(module)[0], inputs[0])


def test_lm_head_gives_the_rows_that_are_asked_for():
    module = read_module(decoder_text(Shape(bias="qkvogudh", tied=False)))
    lowered = LowerLmHead().run(module, PassContext()).module
    draw = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn([int(size) for size in weight.type.shape], generator=draw)
        for name, weight in module.weights.items()
    }
    inputs = {
        "ids": torch.randint(40, (9,), generator=draw).int(),
        "positions": torch.arange(9).int(),
    }
    full = Interpreter(module, weights).run("step", inputs)["logits"]
    for rows in ([8], [2, 5], [7, 0, 7], list(range(9))):
        wanted = torch.tensor(rows, dtype=torch.int32)
        some = Interpreter(lowered, weights, poison=True).run("step", {**inputs, "rows": wanted})
        torch.testing.assert_close(some["logits"], full[rows], rtol=1e-4, atol=1e-4)


def test_lm_head_keeps_one_layer_of_work_for_the_wanted_rows_only():
    """From the last attention on, every GEMM has L rows."""
    module = read_module(decoder_text(Shape(layers=3)))
    result, _ = FUSIONS.run(module)
    gemms = [op for op in result.fn.ops if "linear" in op.name]
    rows = [str(op.results[0].type.shape[0]) for op in gemms]
    assert rows == ["T"] * 9 + ["L"] * 4  # 3 x (qkv, o, gate-up, down) + head
    gathers = [op.args[0].name for op in result.fn.ops if op.name == "tensor.gather_rows"]
    assert len(gathers) == 2

"""Decoders of transformers and our own, traced as they are: every pass on what models really spell.

Checked after each pass: it verifies, prints and parses back, and computes what it did before; at
the end the counts, and the paged function in chunks against the imported one.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers

from ropeway.compiler.driver.import_model import import_model
from ropeway.compiler.ir.parser import parse_module
from ropeway.compiler.ir.printer import print_module
from ropeway.compiler.ops.verifier import verify
from ropeway.compiler.pipeline.base import Numerics, PassContext
from ropeway.compiler.pipeline.probe import Probe
from ropeway.models.registry import ARCHITECTURES
from ropeway.passes import default_pipeline

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
# qkv, gate-up, swiglu, add-norm, norm-linear, rope, attention, lm-head; two layers each.
FULL = (2, 2, 2, 4, 5, 2, 2, 1)
ZOO = {
    "LlamaForCausalLM": ({"attention_bias": True, "mlp_bias": True}, FULL),
    "MistralForCausalLM": ({"sliding_window": 4}, FULL),
    "Qwen2ForCausalLM": ({"tie_word_embeddings": True}, FULL),
    "Qwen3ForCausalLM": ({"head_dim": 10}, FULL),
    # Norms behind the branches stay apart: they read a GEMM's result, and a sum reads theirs.
    "Gemma3ForCausalLM": ({"sliding_window": 4}, FULL),
    "GlmForCausalLM": ({}, (2, 0, 2, 4, 5, 2, 2, 1)),  # gate-up is merged in the checkpoint
    # The only norms are behind branches, and the last one, which reads a sum.
    "Olmo2ForCausalLM": ({}, (2, 2, 2, 1, 1, 2, 2, 1)),
    # One layer norm feeds both branches; gains and no bias, so no RMS kernel fits.
    "CohereForCausalLM": ({}, (2, 2, 2, 0, 0, 2, 2, 1)),
    # qkv is one GEMM in the checkpoint; layer norms; the MLP has no gate; rotation is partial.
    "GPTNeoXForCausalLM": ({}, (0, 0, 0, 0, 0, 2, 2, 1)),
    # Learned positions, no gate, layer norms.
    "OPTForCausalLM": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, (2, 0, 0, 0, 0, 0, 2, 1)),
}
FUSIONS = (
    "fuse-qkv", "fuse-gate-up", "fuse-swiglu", "fuse-add-norm", "fuse-norm-linear", "fuse-rope",
    "fuse-attention", "lower-lm-head",
)  # fmt: skip


def _transformers_model(name, options):
    config_class = getattr(transformers, name).config_class
    config = config_class(**{**TINY, **options})
    torch.manual_seed(0)
    return getattr(transformers, name)(config).eval()


@pytest.mark.parametrize("name", ZOO)
def test_transformers_decoders(name):
    options, counts = ZOO[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        imported = import_model(_transformers_model(name, options), dtype="f32")
    _check(imported.module, counts)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_our_decoders(kind):
    config = {**TINY, "model_type": kind, "sliding_window": 4, "rms_norm_eps": 1e-6}
    architecture = ARCHITECTURES[kind]
    model = architecture(architecture.read(config)).eval()
    _check(import_model(model, dtype="f32").module, FULL)


def _check(module, counts):
    found = dict.fromkeys(FUSIONS, 0)
    state = module
    for item in default_pipeline():
        probe = Probe(state, tokens=9)
        result = item.run(state, PassContext())
        state = result.module
        verify(state)
        assert parse_module(print_module(state)) == state
        limit = 0.0 if item.numerics is Numerics.EXACT else 1e-5
        assert probe.error(state) <= limit, item.name
        if item.name in found:
            found[item.name] += result.matches
    assert tuple(found.values()) == counts
    whole = Probe(module, tokens=11)
    for chunks in [(11,), (1,) * 11, (7, 4), (5, 1, 5)]:
        assert whole.error(state, chunks=chunks) < 1e-5, chunks

"""Imported programs against transformers, through the interpreter, at every position, in float32.

Raw (as imported) and after the raising passes, whose match counts are asserted.
"""

import json
from pathlib import Path

import pytest
import torch
from support.imported_logits import module_logits, raise_module
from support.zoo import (
    ORIGINAL,
    OTHERS,
    OURS,
    ROPES,
    oracle_logits,
    oracle_logits_decoding,
    save_tiny,
    some_ids,
    tiny_model,
)

from ropeway.compiler.driver.import_model import import_model

LENGTH = 4 * ORIGINAL
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
# (rms norms, layer norms, ropes, grouped attentions) raised in two layers; 0 where the model
# already has the op whole or has no such structure.
RAISED = {
    "llama": (5, 0, 4, 2),
    "mistral": (5, 0, 4, 2),
    "qwen2": (5, 0, 4, 2),
    "qwen3": (9, 0, 4, 2),
    "gemma": (5, 0, 4, 2),
    "gemma3_text": (13, 0, 4, 2),
    "olmo": (0, 0, 4, 2),
    "olmo2": (9, 0, 4, 2),
    "phi3": (5, 0, 4, 2),
    "phi": (0, 0, 4, 2),
    "gpt_neox": (0, 0, 4, 0),
    "gpt2": (0, 0, 0, 0),
    "gptj": (0, 0, 4, 0),
    "stablelm": (0, 0, 4, 2),
    "granite": (5, 0, 4, 2),
    "cohere": (7, 7, 4, 2),
    "starcoder2": (0, 0, 4, 2),
    "nemotron": (0, 0, 4, 2),
    "falcon": (0, 0, 4, 0),
    "glm": (5, 0, 4, 2),
    "opt": (0, 0, 0, 0),
    "smollm3": (5, 0, 4, 2),
    "persimmon": (0, 0, 4, 0),
}


GELUS = {"gpt2": 2, "phi": 2, "gptj": 2}  # the tanh form spelt out, once a layer


def kind_of(model: object) -> str:
    """The model type of an instance or a directory."""
    if isinstance(model, Path):
        return str(json.loads((model / "config.json").read_text())["model_type"])
    return str(model.config.model_type)  # type: ignore[attr-defined]


def check(model: object, wanted: torch.Tensor, ids: torch.Tensor, raised: tuple[int, ...]) -> None:
    """Imports `model`, raises, and compares both programs with `wanted`."""
    imported = import_model(model, dtype="f32", max_model_len=len(ids))
    module, report = raise_module(imported.module)
    names = ("raise-rms-norm", "raise-layer-norm", "raise-rope", "raise-gqa", "raise-gelu")
    assert tuple(report.matches(name) for name in names) == (*raised, GELUS.get(kind_of(model), 0))
    for program in (imported.module, module):
        torch.testing.assert_close(module_logits(imported, program, ids), wanted, **CLOSE)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", OURS)
def test_our_modules(kind: str, rope: str, tmp_path: Path) -> None:
    """A directory whose architecture is ours: norms and grouped attention arrive whole."""
    ids = some_ids(LENGTH)
    oracle = oracle_logits_decoding if rope == "dynamic" else oracle_logits
    wanted = oracle(tiny_model(kind, rope), ids)
    check(save_tiny(tmp_path, kind, rope), wanted, ids, (0, 0, 4, 0))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", OURS)
def test_instances_of_transformers(kind: str, rope: str) -> None:
    """transformers' own instances, as they are."""
    ids = some_ids(LENGTH)
    oracle = oracle_logits_decoding if rope == "dynamic" else oracle_logits
    wanted = oracle(tiny_model(kind, rope), ids)
    check(tiny_model(kind, rope), wanted, ids, RAISED[kind])


@pytest.mark.parametrize("kind", OTHERS)
def test_classes_nobody_listed(kind: str) -> None:
    """Any causal LM whose attention is SDPA."""
    ids = some_ids(29)
    model = tiny_model(kind)
    check(model, oracle_logits(model, ids), ids, RAISED[kind])


@pytest.mark.parametrize("kind", ["olmo2", "gpt2", "gemma3_text"])
def test_directories_of_other_types(kind: str, tmp_path: Path) -> None:
    """A model_type that isn't ours is built by transformers' class, without its weights."""
    ids = some_ids(29)
    wanted = oracle_logits(tiny_model(kind), ids)
    check(save_tiny(tmp_path, kind), wanted, ids, RAISED[kind])


def test_an_instance_set_to_eager_attention_is_traced_with_sdpa() -> None:
    ids = some_ids(20)
    model = tiny_model("llama")
    wanted = oracle_logits(model, ids)
    model.set_attn_implementation("eager")
    check(model, wanted, ids, RAISED["llama"])
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", OURS)
def test_bf16_stays_near_float32(kind: str, tmp_path: Path) -> None:
    """max |logit - reference| / max |reference| a position; twice the real bound, being tiny."""
    ids = some_ids(32)
    wanted = oracle_logits(tiny_model(kind), ids)
    for model in (tiny_model(kind), save_tiny(tmp_path, kind)):
        imported = import_model(model, dtype="bf16", max_model_len=32)
        module, _ = raise_module(imported.module)
        got = module_logits(imported, module, ids)
        error = (got - wanted).abs().amax(1) / wanted.abs().amax(1)
        assert error.max() < 6e-2


def test_the_imported_instance_is_left_as_it_was() -> None:
    model = tiny_model("qwen2", "dynamic")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    import_model(model, dtype="bf16", max_model_len=32)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(buffer.device.type == "cpu" for buffer in model.buffers())
    ids = some_ids(8)
    torch.testing.assert_close(oracle_logits(model, ids), oracle_logits(model, ids))


def test_rope_that_changes_at_a_length_agrees_with_decoding() -> None:
    """longrope swaps its frequencies past the original length, by a buffer written in place."""
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "rope_theta": 100.0,
        "original_max_position_embeddings": ORIGINAL,
    }
    length = {"max_position_embeddings": LENGTH, "original_max_position_embeddings": ORIGINAL}
    model = tiny_model("phi3", rope_parameters=rope, **length)
    ids = some_ids(40)
    check(model, oracle_logits_decoding(model, ids), ids, RAISED["phi3"])

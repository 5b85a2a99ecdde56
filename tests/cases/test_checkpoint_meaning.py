"""What a checkpoint means, compiled for cpu, against transformers: heads, ropes, biases, windows.

Every position counts: logprobs of the whole prompt, over block and chunk boundaries.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.zoo import (
    VOCAB,
    oracle_logits,
    save_tiny,
    some_ids,
    tiny_model,
)

import ropeway
from ropeway.compiler.errors import CheckpointError

LENGTH = 63
CLOSE = 2e-3  # of logprobs of some tens, float32


def compile_tiny(model: Any) -> ropeway.Program:
    return ropeway.compile(model, dtype="float32", max_model_len=64, max_num_batched_tokens=64)


def prompt_logprobs(program: ropeway.Program, ids: list[int], **options: Any) -> np.ndarray:
    """f64[len(ids) - 1, V]: after each token but the last, the whole distribution."""
    params = ropeway.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCAB)
    with ropeway.LLM(program, num_threads=2, **options) as llm:
        entries = llm.generate([ids], params)[0].prompt_logprobs[1:]
        rows = np.zeros((len(entries), llm.vocab_size))
    for row, entry in zip(rows, entries, strict=True):
        row[list(entry)] = [token.logprob for token in entry.values()]
    return rows


def wanted_logprobs(model: Any, ids: torch.Tensor) -> np.ndarray:
    logits = oracle_logits(model, ids)
    return torch.log_softmax(logits[:-1].double(), -1).numpy()


# What the greedy answers of tests/parity leave open: (architecture, rope, spelling, settings).
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "rope in the older spelling": ("llama", "yarn", "rope_scaling", {}),
    "no biases, head_dim != hidden/heads": (
        "llama",
        "default",
        "rope_parameters",
        {"attention_bias": False, "mlp_bias": False, "head_dim": 20},
    ),
    "window 1": ("mistral", "default", "rope_parameters", {"sliding_window": 1}),
    "window 31": ("mistral", "default", "rope_parameters", {"sliding_window": 31}),
    "window of a block": ("mistral", "default", "rope_parameters", {"sliding_window": 32}),
    "no window": ("mistral", "default", "rope_parameters", {"sliding_window": None}),
    "some layers slide": ("qwen2", "linear", "rope_scaling", {"num_hidden_layers": 2}),
}


@pytest.mark.parametrize(("kind", "rope", "spelling", "changes"), MODELS.values(), ids=MODELS)
def test_every_position_is_transformers_own(
    tmp_path: Path, kind: str, rope: str, spelling: str, changes: dict[str, Any]
) -> None:
    ids = some_ids(LENGTH, seed=3)
    changes = {"num_hidden_layers": 1, **changes}
    wanted = wanted_logprobs(tiny_model(kind, rope, **changes), ids)
    program = compile_tiny(save_tiny(tmp_path, kind, rope, spelling=spelling, **changes))
    for chunk in (None, 7):
        found = prompt_logprobs(program, ids.tolist(), max_prefill_chunk=chunk)
        assert np.abs(found - wanted).max() < CLOSE


# --- tied and untied heads ---


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], **config: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))


def keep(tensors: dict[str, torch.Tensor]) -> None:
    """No change."""


def drop_head(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["lm_head.weight"]


def copy_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def agrees(folder: Path, model: Any) -> bool:
    ids = some_ids(20)
    found = prompt_logprobs(compile_tiny(folder), ids.tolist())
    return bool(np.abs(found - wanted_logprobs(model, ids)).max() < CLOSE)


@pytest.mark.parametrize("kind", ["llama", "olmo"], ids=["ours", "a class of transformers"])
def test_an_untied_head(tmp_path: Path, kind: str) -> None:
    model = tiny_model(kind, tie_word_embeddings=False, num_hidden_layers=1)
    folder = save_tiny(tmp_path, kind, tie_word_embeddings=False, num_hidden_layers=1)
    assert agrees(folder, model)
    edit(folder, drop_head)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*tie_word_embeddings"):
        compile_tiny(folder)


@pytest.mark.parametrize("kind", ["llama", "olmo"], ids=["ours", "a class of transformers"])
def test_a_tied_head(tmp_path: Path, kind: str) -> None:
    """Absent, or stored twice with the same values: right. Stored twice and different: refused."""
    model = tiny_model(kind, tie_word_embeddings=True, num_hidden_layers=1)
    folder = save_tiny(tmp_path, kind, tie_word_embeddings=True, num_hidden_layers=1)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert agrees(folder, model)
    edit(folder, copy_head)
    assert agrees(folder, model)
    edit(folder, lambda tensors: tensors["lm_head.weight"].add_(0.5))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*differ.*tie_word_embeddings"):
        compile_tiny(folder)


def test_a_tie_that_the_config_leaves_out_is_the_architectures_default(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "a", "llama", tie_word_embeddings=True, num_hidden_layers=1)
    settings = json.loads((folder / "config.json").read_text())
    del settings["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        compile_tiny(folder)
    gemma = save_tiny(tmp_path / "b", "gemma", num_hidden_layers=1)
    assert "tie_word_embeddings" not in json.loads((gemma / "config.json").read_text())
    assert "lm_head.weight" not in load_file(gemma / "model.safetensors")
    assert agrees(gemma, tiny_model("gemma", num_hidden_layers=1))


def test_tensor_parallelism_is_refused_and_never_half_done(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", num_hidden_layers=1)
    with pytest.raises(TypeError, match="parallel"):
        ropeway.compile(folder, parallel={"tp": 2})  # type: ignore[call-arg]


# --- quantized checkpoints ---

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (f"{Q_PROJ}.weight", torch.ones(32, 32, dtype=torch.int8)),
        (f"{Q_PROJ}.weight", torch.ones(32, 32).to(torch.float8_e4m3fn)),
        (f"{Q_PROJ}.qweight", torch.ones(4, 32, dtype=torch.int32)),
        (f"{Q_PROJ}.weight_scale", torch.ones(1)),
    ],
    ids=["int8", "fp8", "packed", "scales beside"],
)
def test_quantized_tensors_are_refused_by_name(
    tmp_path: Path, name: str, tensor: torch.Tensor
) -> None:
    folder = save_tiny(tmp_path, "llama", num_hidden_layers=1)
    edit(folder, lambda tensors: tensors.update({name: tensor}))
    with pytest.raises(CheckpointError, match=rf"{name.replace('.', '[.]')}.*quantized"):
        compile_tiny(folder)


@pytest.mark.parametrize("ignored", [[], ["lm_head"], ["re:.*"]])
def test_a_config_that_says_quantized_is_refused(tmp_path: Path, ignored: list[str]) -> None:
    """Whatever its list of exceptions matches: no layer is loaded as if it weren't quantized."""
    settings = {"quant_method": "compressed-tensors", "ignore": ignored}
    folder = save_tiny(tmp_path, "llama", num_hidden_layers=1)
    edit(folder, keep, quantization_config=settings)
    with pytest.raises(CheckpointError, match=r"quantized \(compressed-tensors\)"):
        compile_tiny(folder)
    with pytest.raises(TypeError, match="quantize"):
        ropeway.compile(folder, quantize="int8")  # type: ignore[call-arg]

"""GGUF files against transformers with the values that the file holds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.imported_logits import module_logits
from support.tiny_gguf import write_gguf
from support.zoo import oracle_logits, some_ids, tiny_model
from transformers import PreTrainedModel

from ropeway.compiler.driver.import_model import import_model
from ropeway.compiler.errors import CheckpointError

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
FULL = {"sliding_window": None, "use_sliding_window": False}  # GGUF files don't say windows


def with_values(model: PreTrainedModel, values: dict[str, torch.Tensor]) -> PreTrainedModel:
    """The model with what the file holds."""
    missing = set(model.load_state_dict(values, strict=False).missing_keys)
    assert missing <= {"lm_head.weight"}
    model.tie_weights()
    return model


def check(path: Path, oracle: PreTrainedModel, length: int = 40) -> None:
    ids = some_ids(length)
    imported = import_model(path, dtype="f32")
    got = module_logits(imported, imported.module, ids)
    wanted = oracle_logits(oracle, ids)
    assert wanted.abs().max() > 0.5
    torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_architecture(kind: str, tied: bool, tmp_path: Path) -> None:
    """Names, permutation, biases, q/k norms and head sizes; a tied head has no tensor."""
    changes = FULL if kind != "llama" else {"attention_bias": False, "mlp_bias": False}
    model = tiny_model(kind, tie_word_embeddings=tied, **changes)
    values = write_gguf(tmp_path / "m.gguf", model)
    check(tmp_path / "m.gguf", with_values(model, values))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_simple_type(kind: str, tmp_path: Path) -> None:
    model = tiny_model("llama", intermediate_size=64, attention_bias=False, mlp_bias=False)
    values = write_gguf(tmp_path / "m.gguf", model, kind)
    check(tmp_path / "m.gguf", with_values(model, values))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_every_k_quant(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    plain = {"attention_bias": False, "mlp_bias": False, "num_hidden_layers": 1}
    model = tiny_model("llama", **sizes, **plain)
    values = write_gguf(tmp_path / "m.gguf", model, kind)
    check(tmp_path / "m.gguf", with_values(model, values), length=12)


@pytest.mark.parametrize("rope", ["linear", "yarn"])
def test_rope_scaling_from_metadata(rope: str, tmp_path: Path) -> None:
    model = tiny_model("qwen2", rope, **FULL)
    settings = {"scaling": rope, "factor": 4.0, "original": 16}
    values = write_gguf(tmp_path / "m.gguf", model, **settings)
    check(tmp_path / "m.gguf", with_values(model, values), length=64)


def test_llama3_rope_is_a_tensor_of_divisors(tmp_path: Path) -> None:
    """GGUF stores plain over scaled frequencies; transformers computes the scaled ones."""
    model = tiny_model("llama", "llama3", attention_bias=False, mlp_bias=False)
    plain = tiny_model("llama", attention_bias=False, mlp_bias=False)
    divisors = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    assert divisors.max() > 3
    values = write_gguf(tmp_path / "m.gguf", model, rope_freqs=divisors.numpy())
    check(tmp_path / "m.gguf", with_values(model, values), length=64)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model("qwen2"))
    data = path.read_bytes()
    for size in (0, 3, 30, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            import_model(path)


def test_values_that_are_not_finite_are_refused_when_read(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    with torch.no_grad():
        model.model.norm.weight[3] = np.nan
    write_gguf(tmp_path / "m.gguf", model)
    imported = import_model(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"norm\.weight.*NaN"):
        imported.source.get("model.norm.weight")


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    model.config.model_type = "abacus"
    write_gguf(tmp_path / "m.gguf", model)
    with pytest.raises(CheckpointError, match="architecture 'abacus'"):
        import_model(tmp_path / "m.gguf")

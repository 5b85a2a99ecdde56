"""Tiny random checkpoints of every architecture and rope variant, with transformers as the oracle.

Everything is random that a checkpoint may hold: biases, gains and q/k norms too, so that a dropped
one shows. Weights are drawn wide enough that logits lead clearly.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

VOCAB = 97
POSITIONS = 64
ORIGINAL = 16  # the length before scaling, where a rope variant has one

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
OURS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5},
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "num_attention_heads": 3, "num_key_value_heads": 1},
}
"""The architectures of models/: overrides that exercise what is special about each."""

_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "olmo": {},
    "olmo2": {},
    "phi3": {"pad_token_id": 0},
    "phi": {},
    "gpt_neox": {},
    "gpt2": _GPT2,
    "gptj": {**_GPT2, "rotary_dim": 4},
    "stablelm": {},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "cohere": {"use_qk_norm": True},
    "starcoder2": {"sliding_window": 6},
    "nemotron": {},
    "falcon": {},
    "glm": {"head_dim": 8, "pad_token_id": 0},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 0},
    "smollm3": {"pad_token_id": 0},
    "persimmon": {},
}
"""Classes of transformers that no code of ours names."""

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}
THETA = 100.0  # small, so that every frequency turns within the tiny lengths


def tiny_config(
    kind: str, rope: str = "default", *, spelling: str = "rope_parameters", **changes: Any
) -> dict[str, Any]:
    """A config.json's content. `spelling` is that of rope: "rope_parameters" or "rope_scaling".

    Dynamic rope grows from `max_position_embeddings`, which is then the original length.
    """
    config = {"model_type": kind, **_BASE, **(OURS | OTHERS)[kind]}
    if rope == "dynamic":
        config["max_position_embeddings"] = ORIGINAL
    if kind in OURS or rope != "default":
        settings = dict(ROPES[rope])
        if spelling == "rope_parameters":
            config["rope_parameters"] = {"rope_type": "default", **settings, "rope_theta": THETA}
        else:
            settings["type"] = settings.pop("rope_type", "default")
            config |= {"rope_theta": THETA}
            config |= {"rope_scaling": settings} if rope != "default" else {}
    return config | changes


def tiny_model(kind: str, rope: str = "default", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """transformers' own instance in float32, everything random, attention SDPA."""
    config = dict(tiny_config(kind, rope, **changes))
    del config["model_type"]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 0.5)
    return model.float().eval()


def save_tiny(
    folder: Path, kind: str, rope: str = "default", seed: int = 0, **changes: Any
) -> Path:
    """The same model as a Hugging Face directory (config.json as written here, no tokenizer)."""
    spelling = changes.pop("spelling", "rope_parameters")
    model = tiny_model(kind, rope, seed, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(kind, rope, spelling=spelling, **changes)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tied = bool(model.config.tie_word_embeddings)
    tensors = {
        name: tensor.contiguous().clone()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def some_ids(count: int, seed: int = 0) -> torch.Tensor:
    """int32[count] token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).to(torch.int32)


def oracle_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """f32[T, V] of one sequence, by transformers."""
    with torch.no_grad():
        return model(input_ids=ids[None].long(), use_cache=False).logits[0].float()


def oracle_logits_decoding(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """f32[T, V], token by token with a cache: what length-dependent rope means in generation."""
    rows, cache = [], DynamicCache(config=model.config)
    with torch.no_grad():
        for at in range(len(ids)):
            step = ids[None, at : at + 1].long()
            out = model(input_ids=step, cache=cache, use_cache=True)
            rows.append(out.logits[0, -1].float())
    return torch.stack(rows)

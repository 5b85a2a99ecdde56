"""Writes GGUF files of tiny models, as llama.cpp's converter lays them out."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

_IN_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
# Where the f16 scales of a K-quant block lie; the rest of a block may be any bytes.
_K_BLOCKS = {
    "Q2_K": (84, (80, 82)),
    "Q3_K": (110, (108,)),
    "Q4_K": (144, (0, 2)),
    "Q5_K": (176, (0, 2)),
    "Q6_K": (210, (208,)),
}


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    stem, _, suffix = name.rpartition(".")
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_IN_LAYER[rest]}.{suffix}"


def write_gguf(
    path: Path, model: PreTrainedModel, kind: str = "F32", **extra: Any
) -> dict[str, torch.Tensor]:
    """Writes `model` with its matrices as `kind`; returns the values that the file holds.

    Values come back under Hugging Face names, dequantized by the `gguf` package. `extra` metadata
    overrides (`rope_scaling_type="linear"`) or, for `rope_freqs`, adds a tensor.
    """
    config = model.config
    architecture = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if "factor" in extra:
        writer.add_rope_scaling_type(gguf.RopeScalingType(extra["scaling"]))
        writer.add_rope_scaling_factor(extra["factor"])
        writer.add_rope_scaling_orig_ctx_len(extra["original"])
    for add in extra.get("metadata", ()):
        add(writer)
    if "rope_freqs" in extra:
        writer.add_tensor("rope_freqs.weight", np.asarray(extra["rope_freqs"], np.float32))
    stored = {}
    tied = bool(config.tie_word_embeddings)
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        data = tensor.float().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            data = _permute(data, heads if "q_proj" in name else kv_heads)
        quantized, values = _quantize(data, kind if data.ndim == 2 else "F32")
        dtype = None if quantized.dtype == np.float32 else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(gguf_name(name), quantized, raw_dtype=dtype)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = _unpermute(values, heads if "q_proj" in name else kv_heads)
        stored[name] = torch.from_numpy(np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _permute(data: np.ndarray, heads: int) -> np.ndarray:
    rows = data.shape[0] // heads // 2
    return data.reshape(heads, 2, rows, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)


def _unpermute(data: np.ndarray, heads: int) -> np.ndarray:
    rows = data.shape[0] // heads // 2
    return data.reshape(heads, rows, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)


def _quantize(data: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(what the file holds, the values it stands for)."""
    data = np.ascontiguousarray(data)
    if kind == "F32":
        return data, data
    wanted = gguf.GGMLQuantizationType[kind]
    if kind in _K_BLOCKS:  # the package reads these but doesn't write them: random blocks
        size, scales = _K_BLOCKS[kind]
        generator = np.random.default_rng(data.size)
        blocks = generator.integers(0, 256, (data.size // 256, size), np.uint8)
        for at in scales:
            values = generator.uniform(0.001, 0.004, len(blocks)).astype(np.float16)
            blocks[:, at : at + 2] = values.view(np.uint8).reshape(-1, 2)
        stored = blocks.reshape(data.shape[0], -1)
    else:
        stored = gguf.quants.quantize(data, wanted)
    return stored, gguf.quants.dequantize(stored, wanted).reshape(data.shape)

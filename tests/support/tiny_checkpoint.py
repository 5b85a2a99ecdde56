"""A tiny random Llama with a byte-level tokenizer, as a Hugging Face directory.

Weights are drawn wide enough that the likeliest token leads clearly: its ids don't depend on the
instruction set or on rounding.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
VOCAB = 256 + len(SPECIAL)
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
    "torch_dtype": "float32",
}


def make_checkpoint(folder: Path, seed: int = 0, **changes: object) -> Path:
    """Write the checkpoint into `folder`; `changes` go into config.json. Same seed, same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_tensors(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return folder


def byte_prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens, none special; of one seed and different lengths none begins another."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(256, (length,), generator=generator).tolist()


def _tensors(config: dict[str, object], seed: int) -> dict[str, torch.Tensor]:
    size = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, inner, dim = size["hidden_size"], size["intermediate_size"], size["head_dim"]
    heads, kv_heads = size["num_attention_heads"], size["num_key_value_heads"]
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (2.0 / columns**0.5)

    def gain() -> torch.Tensor:
        return 1.0 + 0.2 * torch.randn(hidden, generator=generator)

    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, hidden, generator=generator)}
    for layer in range(size["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        tensors[f"{name}self_attn.q_proj.weight"] = matrix(heads * dim, hidden)
        tensors[f"{name}self_attn.k_proj.weight"] = matrix(kv_heads * dim, hidden)
        tensors[f"{name}self_attn.v_proj.weight"] = matrix(kv_heads * dim, hidden)
        tensors[f"{name}self_attn.o_proj.weight"] = matrix(hidden, heads * dim)
        tensors[f"{name}mlp.gate_proj.weight"] = matrix(inner, hidden)
        tensors[f"{name}mlp.up_proj.weight"] = matrix(inner, hidden)
        tensors[f"{name}mlp.down_proj.weight"] = matrix(hidden, inner)
        tensors[f"{name}input_layernorm.weight"] = gain()
        tensors[f"{name}post_attention_layernorm.weight"] = gain()
    tensors["model.norm.weight"] = gain()
    tensors["lm_head.weight"] = matrix(VOCAB, hidden)
    return tensors


def _tokenizer() -> Tokenizer:
    """Every byte is one token; no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer

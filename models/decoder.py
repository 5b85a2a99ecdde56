"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share, in plain PyTorch.

It maps token ids [batch, tokens] to logits [batch, tokens, vocab]; it knows nothing of caches,
chunks or targets. Parameter names are those of the published checkpoints.
"""

import torch
from torch import nn
from torch.nn import functional

from ropeway.models.config import DecoderConfig
from ropeway.models.rope import apply_rope, rope_tables


class RmsNorm(nn.Module):
    """Root-mean-square norm over the last dim with a learned gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention; `window` 0 sees everything before, w only the last w tokens."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.window = window
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, heads, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=config.out_bias)
        self.q_norm = RmsNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RmsNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        split = (batch, tokens, -1, self.head_dim)
        q = self.q_proj(x).view(split)
        k = self.k_proj(x).view(split)
        v = self.v_proj(x).view(split)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        attended = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=sliding_mask(tokens, self.window) if self.window else None,
            is_causal=not self.window,
            enable_gqa=True,
        )
        return self.o_proj(attended.transpose(1, 2).reshape(batch, tokens, -1))


class Mlp(nn.Module):
    """The gated feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, window)
        self.mlp = Mlp(config)
        self.input_layernorm = RmsNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers and the last norm: ids [batch, tokens] -> [batch, tokens, hidden]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, window) for window in config.windows)
        self.norm = RmsNorm(config.hidden_size, config.norm_eps)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = functional.embedding(input_ids, self.embed_tokens.weight)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        cos, sin = rope_tables(self.config.rope, self.config.head_dim, positions)
        cos, sin = cos[None, :, None, :], sin[None, :, None, :]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Decoder(nn.Module):
    """A causal language model: ids int64[batch, tokens] -> logits [batch, tokens, vocab]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(input_ids))


def sliding_mask(tokens: int, window: int) -> torch.Tensor:
    """bool[tokens, tokens]: query i sees key j when i - window < j <= i."""
    at = torch.arange(tokens)
    behind = at[:, None] - at[None, :]
    return (behind >= 0) & (behind < window)

"""Qwen3, dense: norms on each head's q and k, and a head size of its own."""

from collections.abc import Mapping
from typing import Any

from ropeway.models.config import DecoderConfig, flag, read_config
from ropeway.models.decoder import Decoder
from ropeway.models.qwen2 import switched_windows


class Qwen3ForCausalLM(Decoder):
    """Qwen3, dense; head_dim is 128 where the config doesn't say."""

    @staticmethod
    def read(config: Mapping[str, Any]) -> DecoderConfig:
        """The decoder's numbers from a config.json's content."""
        bias = flag(config, "attention_bias", False)
        return read_config(
            config,
            windows=switched_windows(config),
            max_positions=32768,
            head_dim=128,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
        )

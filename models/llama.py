"""Llama: the plain decoder, with optional biases."""

from collections.abc import Mapping
from typing import Any

from ropeway.models.config import DecoderConfig, flag, read_config
from ropeway.models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    """Llama 1 to 3 and what is shaped like them (SmolLM2, TinyLlama, Yi)."""

    @staticmethod
    def read(config: Mapping[str, Any]) -> DecoderConfig:
        """The decoder's numbers from a config.json's content."""
        bias = flag(config, "attention_bias", False)
        return read_config(
            config,
            max_positions=2048,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=flag(config, "mlp_bias", False),
        )

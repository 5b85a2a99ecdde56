"""Mistral: the plain decoder with a sliding window in every layer."""

from collections.abc import Mapping
from typing import Any

from ropeway.models.config import DecoderConfig, integer, layer_windows, read_config
from ropeway.models.decoder import Decoder


class MistralForCausalLM(Decoder):
    """Mistral 7B and later; `sliding_window` null means full attention."""

    @staticmethod
    def read(config: Mapping[str, Any]) -> DecoderConfig:
        """The decoder's numbers from a config.json's content."""
        # A config that doesn't name the window means the published default; null means none.
        named = {"sliding_window": 4096, **config, "layer_types": None}
        windows = layer_windows(named, integer(config, "num_hidden_layers"), first=0)
        return read_config(config, windows=windows, max_positions=4096 * 32, kv_heads=8)

"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window from some layer on, if switched on."""

from collections.abc import Mapping
from typing import Any

from ropeway.models.config import DecoderConfig, flag, integer, layer_windows, read_config
from ropeway.models.decoder import Decoder


def switched_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Windows by layer, all 0 unless `use_sliding_window` is true."""
    layers = integer(config, "num_hidden_layers")
    if not flag(config, "use_sliding_window", False):
        return (0,) * layers
    first = config.get("max_window_layers", 28)
    named = {"sliding_window": 4096, **config}
    return layer_windows(named, layers, first=first if isinstance(first, int) else 28)


class Qwen2ForCausalLM(Decoder):
    """Qwen2 and Qwen2.5, dense."""

    @staticmethod
    def read(config: Mapping[str, Any]) -> DecoderConfig:
        """The decoder's numbers from a config.json's content."""
        windows = switched_windows(config)
        return read_config(config, windows=windows, max_positions=32768, qkv_bias=True)

"""A config.json's content from the metadata of a GGUF file."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ropeway.compiler.errors import CheckpointError

ARCHITECTURES = ("llama", "qwen2", "qwen3")


def read_gguf_config(
    file: str,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_divisors: tuple[float, ...] | None,
) -> dict[str, Any]:
    """The config that describes the file's model (mistral files call themselves llama).

    `shapes` are those of the file's tensors, in torch's order. Raises CheckpointError.
    """
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise CheckpointError(
            f"{file}: architecture {kind!r} isn't supported; known are {', '.join(ARCHITECTURES)}"
        )
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{file}: there is no token embedding; the file is incomplete")
    read = _Metadata(file, str(kind), metadata)
    heads = read.integer("attention.head_count")
    hidden = read.integer("embedding_length")
    head_dim = read.integer("attention.key_length", hidden // max(1, heads))
    if read.integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{file}: keys and values differ in size, which isn't supported")
    if read.integer("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{file}: only some dims rotate, which {kind} doesn't do")
    config = {
        "model_type": kind,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": read.integer("feed_forward_length"),
        "num_hidden_layers": read.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": read.integer("context_length"),
        "rope_theta": read.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
    }
    scaling = _rope_scaling(read, rope_divisors)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _rope_scaling(read: "_Metadata", divisors: tuple[float, ...] | None) -> dict[str, Any] | None:
    if divisors is not None:
        return {"rope_type": "divided", "divisors": list(divisors)}
    kind = read.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{read.file}: rope scaling {kind!r} isn't supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": read.number("rope.scaling.factor")}
    original = read.integer("rope.scaling.original_context_length", 0)
    if kind == "yarn" and original:
        scaling["original_max_position_embeddings"] = original
    return scaling


class _Metadata:
    """Typed access to `<architecture>.<key>`."""

    def __init__(self, file: str, kind: str, metadata: Mapping[str, Any]) -> None:
        self.file = file
        self._kind = kind
        self._metadata = metadata

    def _get(self, key: str, default: object) -> Any:
        value = self._metadata.get(f"{self._kind}.{key}", default)
        if value is None:
            raise CheckpointError(f"{self.file}: metadata {self._kind}.{key} is missing")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A non-negative integer; a list of equal ones (one a layer) counts as one."""
        value = self._get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CheckpointError(f"{self.file}: metadata {self._kind}.{key} is {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float, as the shortest decimal that float32 holds (the file stores float32)."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.file}: metadata {self._kind}.{key} is {value!r}")
        return float(str(np.float32(value)))

    def text(self, key: str, default: str) -> str:
        """A string."""
        return str(self._get(key, default))

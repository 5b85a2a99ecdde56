"""A GGUF file as a config and tensors under Hugging Face names, dequantized one at a time.

Reads what the `gguf` package reads; the config is rebuilt from the metadata, the permutation that
llama files put on q and k is undone, and llama3's rope factors (a tensor in GGUF) become settings.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ropeway.compiler.errors import CheckpointError, MissingExtraError
from ropeway.compiler.frontend.checkpoints.gguf_config import read_gguf_config

if TYPE_CHECKING:
    from gguf import ReaderTensor

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_PLAIN = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_SUPPORTED = {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}


@dataclass(frozen=True)
class GgufFile:
    """An opened file: a config as config.json would hold it, tensors, and the raw metadata."""

    config: dict[str, Any]
    tensors: "GgufTensors"
    metadata: Mapping[str, Any]


def open_gguf(path: Path) -> GgufFile:
    """Opens a GGUF file. Raises CheckpointError for a damaged or unsupported one."""
    try:
        from gguf import GGUFReader  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise MissingExtraError("reading a .gguf file", "gguf", "import") from error
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the package raises whatever numpy or struct raise
        raise CheckpointError(
            f"{path.name}: truncated or not a GGUF file ({type(error).__name__}: {error})"
        ) from error
    found: dict[str, ReaderTensor] = {}
    for tensor in reader.tensors:
        if tensor.name in found:
            raise CheckpointError(f"{path.name}: tensor {tensor.name!r} stands twice")
        found[tensor.name] = tensor
    factors = found.pop(_ROPE_FACTORS, None)
    divisors = None if factors is None else tuple(float(f) for f in np.ravel(factors.data))
    config = read_gguf_config(path.name, metadata, _sizes(found), divisors)
    return GgufFile(config, GgufTensors(path.name, found, config), metadata)


def _sizes(tensors: Mapping[str, "ReaderTensor"]) -> dict[str, tuple[int, ...]]:
    """Shapes in torch's order; GGUF writes the fastest dim first."""
    return {name: tuple(int(n) for n in t.shape)[::-1] for name, t in tensors.items()}


class GgufTensors:
    """A TensorSource of Hugging Face names over a GGUF file's tensors."""

    def __init__(
        self, file: str, tensors: Mapping[str, "ReaderTensor"], config: Mapping[str, Any]
    ) -> None:
        self._file = file
        self._shapes = _sizes(tensors)
        self._heads = {
            "q_proj": int(config["num_attention_heads"]),
            "k_proj": int(config["num_key_value_heads"]),
        }
        self._permuted = config["model_type"] == "llama"
        self._tensors: dict[str, ReaderTensor] = {}
        for name, tensor in tensors.items():
            kind = tensor.tensor_type.name
            if kind not in _PLAIN and kind not in _SUPPORTED:
                known = ", ".join([*_PLAIN, *sorted(_SUPPORTED)])
                raise CheckpointError(
                    f"{file}: tensor {name!r} is of type {kind}; supported are {known}"
                )
            self._tensors[_hugging_face_name(name)] = tensor

    def names(self) -> list[str]:
        """Hugging Face names; tensors without one keep their own."""
        return list(self._tensors)

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape); quantized tensors read as f32."""
        tensor = self._tensor(name)
        return _PLAIN.get(tensor.tensor_type.name, "f32"), self._shapes[tensor.name]

    def file_of(self, name: str) -> str:
        """The file that holds a tensor, for errors."""
        return self._file

    def get(self, name: str) -> torch.Tensor:
        """The tensor, dequantized, q and k in the order of Hugging Face checkpoints."""
        from gguf import quants  # noqa: PLC0415 -- an extra

        tensor = self._tensor(name)
        kind, shape = tensor.tensor_type.name, self._shapes[tensor.name]
        try:
            if kind == "BF16":
                raw = np.ascontiguousarray(tensor.data).view(np.int16)
                value = torch.from_numpy(raw.copy()).view(torch.bfloat16).reshape(shape)
            elif kind in _PLAIN:
                value = torch.from_numpy(np.array(tensor.data)).reshape(shape)
            else:
                dequantized = quants.dequantize(tensor.data, tensor.tensor_type)
                value = torch.from_numpy(dequantized).reshape(shape)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{self._file}: tensor {tensor.name!r} ({kind}) can't be read ({error})"
            ) from error
        return self._in_order(name, value)

    def _in_order(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Undoes llama.cpp's interleaving of the halves that rope rotates."""
        projection = name.split(".")[-2] if "." in name else ""
        if not self._permuted or projection not in self._heads:
            return value
        heads = self._heads[projection]
        rows = value.shape[0]
        split = value.reshape(heads, rows // heads // 2, 2, *value.shape[1:])
        return split.transpose(1, 2).reshape(value.shape)

    def _tensor(self, name: str) -> "ReaderTensor":
        if name not in self._tensors:
            raise CheckpointError(f"{self._file}: there is no tensor for {name!r}")
        return self._tensors[name]


def _hugging_face_name(name: str) -> str:
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        return name
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"

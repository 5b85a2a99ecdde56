"""Which of our architectures a config.json's `model_type` names."""

from collections.abc import Mapping
from typing import Any

import torch

from ropeway.compiler.errors import CheckpointError
from ropeway.models.decoder import Decoder
from ropeway.models.llama import LlamaForCausalLM
from ropeway.models.mistral import MistralForCausalLM
from ropeway.models.qwen2 import Qwen2ForCausalLM
from ropeway.models.qwen3 import Qwen3ForCausalLM

ARCHITECTURES: dict[
    str,
    type[LlamaForCausalLM]
    | type[MistralForCausalLM]
    | type[Qwen2ForCausalLM]
    | type[Qwen3ForCausalLM],
] = {
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}


def build_model(config: Mapping[str, Any]) -> Decoder:
    """The module that a config.json describes, on the meta device: no weights are allocated.

    Raises CheckpointError for an architecture that isn't ours or numbers that make no sense.
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise CheckpointError(
            f"config.json: model_type {kind!r} isn't one of {list(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[kind]
    with torch.device("meta"):
        return architecture(architecture.read(config)).eval()

"""What an import gives: the module, where its tensors come from, its tokenizer and its name."""

from dataclasses import dataclass

import torch

from ropeway.compiler.ir.graph import Module
from ropeway.compiler.ops.tensors import TensorSource
from ropeway.runtime.text.assets import TokenizerAssets


@dataclass(frozen=True)
class Imported:
    """An imported model, its weights not yet read.

    `module` has one function @step (ids, positions i32[T] -> logits [T, V]) with nn.sdpa over one
    sequence. `source` holds the checkpoint's tensors, `constants` those derived while importing.
    `tokenizer` is None for a model that came without one.
    """

    module: Module
    source: TensorSource
    constants: TensorSource
    tokenizer: TokenizerAssets | None
    name: str
    architecture: str
    vocab_size: int
    max_model_len: int


@dataclass(frozen=True)
class TensorDict:
    """A TensorSource over tensors in memory."""

    tensors: dict[str, torch.Tensor]

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self.tensors)

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """IR dtype and shape. Raises KeyError for an unknown name."""
        tensor = self.tensors[name]
        return dtype_name(tensor.dtype), tuple(tensor.shape)

    def get(self, name: str) -> torch.Tensor:
        """The tensor itself. Raises KeyError for an unknown name."""
        return self.tensors[name]


_NAMES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
}


def dtype_name(dtype: torch.dtype) -> str:
    """IR name of a torch dtype; dtypes the IR lacks keep torch's name."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))

"""Where tensors come from: a checkpoint or the constants made at import time."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class TensorSource(Protocol):
    """Named tensors, read one at a time, so that a large checkpoint never is in memory whole."""

    def names(self) -> Iterable[str]:
        """The names of all tensors."""

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) without reading the data; dtypes as in IR text (f32, bf16, ...).

        A dtype that the IR doesn't know keeps its own name (f64, u8). Raises CheckpointError for
        an unknown name.
        """

    def get(self, name: str) -> "torch.Tensor":
        """The tensor, on the host. Raises CheckpointError for an unknown name."""

"""The tensors of an nn.Module that was passed in: its state, as it is in memory."""

from torch import nn

from ropeway.compiler.errors import CheckpointError
from ropeway.compiler.frontend.checkpoints.binding import BoundSource
from ropeway.compiler.frontend.imported import TensorDict


def module_source(module: nn.Module) -> BoundSource:
    """A source over a module's parameters and buffers. Raises CheckpointError for one on meta."""
    tensors = {
        name: tensor.detach()
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
    }
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise CheckpointError(
                f"{type(module).__name__}: {name!r} is on the meta device and has no values; "
                "load the weights first, or give the checkpoint's directory"
            )
    return BoundSource(TensorDict(tensors), {name: name for name in tensors})

"""Position modules that branch on the length, called as one opaque op.

Dynamic rope decides by `if length > ...` in Python, which can't be traced. Such a module depends on
positions alone, so the trace calls it whole and the importer evaluates it position by position:
each with the frequencies of a sequence that ends there, as when decoding token by token.
"""

import copy
import types

import torch
from torch import nn


@torch.library.custom_op("ropeway::position_module", mutates_args=())
def position_module(
    position_ids: torch.Tensor, module: str, layer_type: str, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for `module(x, position_ids)` with x of `dtype`; only traced, never run."""
    raise NotImplementedError("ropeway::position_module stands in a trace and isn't run")


@position_module.register_fake
def _(
    position_ids: torch.Tensor, module: str, layer_type: str, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*position_ids.shape, width)
    return position_ids.new_empty(shape, dtype=dtype), position_ids.new_empty(shape, dtype=dtype)


def make_opaque(module: nn.Module, shadow: nn.Module) -> dict[str, nn.Module]:
    """Replaces the dynamic rope modules of `shadow` by opaque calls; returns real copies by name.

    A dynamic rope module is one whose `rope_type` (a string, or one by layer type) holds
    "dynamic": the convention of transformers' rotary embeddings.
    """
    found: dict[str, nn.Module] = {}
    for name, child in shadow.named_modules():
        kinds = getattr(child, "rope_type", None)
        names = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if not any(isinstance(kind, str) and "dynamic" in kind for kind in names):
            continue
        real = module.get_submodule(name)
        width = 2 * next(real.buffers()).shape[-1]
        found[name] = copy.deepcopy(real)

        def forward(
            self: nn.Module,
            x: torch.Tensor,
            position_ids: torch.Tensor,
            layer_type: str | None = None,
            *,
            name: str = name,
            width: int = width,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return position_module(position_ids, name, layer_type or "", width, x.dtype)

        child.forward = types.MethodType(forward, child)
    return found


def evaluate_position_module(
    module: nn.Module, positions: torch.Tensor, layer_type: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, f32[1, n, width], of positions int64[1, n], each decoded on its own."""
    options = {"layer_type": layer_type} if layer_type else {}
    dummy = torch.zeros(1, 1, 1)
    rows = [module(dummy, at.reshape(1, 1), **options) for at in positions.reshape(-1)]
    return torch.cat([row[0] for row in rows], 1), torch.cat([row[1] for row in rows], 1)

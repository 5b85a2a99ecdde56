"""Pairs the parameters of a module with the tensors of a checkpoint, all or nothing.

After binding every parameter has exactly one tensor of its shape, tied heads are right, and nothing
of the checkpoint is left over. What is damaged is said before anything is built.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ropeway.compiler.errors import CheckpointError
from ropeway.compiler.ops.tensors import TensorSource

_FLOATS = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class BoundSource:
    """A TensorSource by parameter name; `stored` maps it to the checkpoint's name.

    Every tensor is checked for NaN and infinity when it is read.
    """

    source: TensorSource
    stored: Mapping[str, str]

    def names(self) -> list[str]:
        """All parameter names."""
        return list(self.stored)

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of the tensor behind a parameter."""
        return self.source.info(self._stored(name))

    def get(self, name: str) -> torch.Tensor:
        """The tensor behind a parameter. Raises CheckpointError if a value isn't finite."""
        stored = self._stored(name)
        tensor = self.source.get(stored)
        if tensor.is_floating_point() and tensor.numel():
            # min and max propagate NaN: one pass and no copy, where isfinite would make one.
            low, high = torch.aminmax(tensor)
            if not bool(torch.isfinite(low) & torch.isfinite(high)):
                raise CheckpointError(
                    f"{_label(self.source, stored)} holds NaN or infinity; it is damaged"
                )
        return tensor

    def _stored(self, name: str) -> str:
        if name not in self.stored:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}")
        return self.stored[name]


def bind(module: nn.Module, source: TensorSource, *, prefix: str = "", tied: bool) -> BoundSource:
    """Pairs `module`'s parameters and persistent buffers with `source`.

    `prefix` is what the checkpoint may leave out of or put before names (transformers' base model
    prefix). `tied`: the config says that the head is the embedding. Raises CheckpointError.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    present = set(source.names())
    owners = _owners(module)
    stored: dict[str, str] = {}
    used: set[str] = set()
    missing: list[str] = []
    for name, shape in wanted.items():
        group = [name, *(other for other in owners.get(name, ()) if other != name)]
        found = [s for other in group for s in _spellings(other, prefix) if s in present]
        if not found:
            missing.append(name)
            continue
        stored[name] = found[0]
        used.update(found)
        _check_ties(source, found, shape)
    if missing:
        raise CheckpointError(_describe_missing(missing, tied))
    _check_shapes(source, stored, wanted)
    _check_extra(present - used, module, prefix, tied)
    return BoundSource(source, stored)


def _label(source: TensorSource, stored: str) -> str:
    """A tensor for errors, with its file where the source has files."""
    file_of = getattr(source, "file_of", None)
    return f"{file_of(stored)}: tensor {stored!r}" if file_of else f"tensor {stored!r}"


def _owners(module: nn.Module) -> dict[str, list[str]]:
    """Parameter name -> all names under which the same parameter stands."""
    by_identity: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
    return {name: names for names in by_identity.values() for name in names}


def _spellings(name: str, prefix: str) -> list[str]:
    if not prefix:
        return [name]
    return [name, name.removeprefix(prefix + "."), f"{prefix}.{name}"]


def _check_ties(source: TensorSource, found: list[str], shape: tuple[int, ...]) -> None:
    """Tensors stored several times under tied names must be equal."""
    first = found[0]
    for other in found[1:]:
        if other == first:
            continue
        same = source.info(other) == source.info(first) and source.info(first)[1] == shape
        if not same or not torch.equal(source.get(other), source.get(first)):
            raise CheckpointError(
                f"config.json ties {other!r} to {first!r}, but the checkpoint holds both and they "
                "differ; set tie_word_embeddings to false to use both"
            )


def _check_shapes(
    source: TensorSource, stored: Mapping[str, str], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    for name, shape in wanted.items():
        dtype, own = source.info(stored[name])
        if own != shape:
            raise CheckpointError(
                f"{_label(source, stored[name])} has shape {list(own)}; the model built from "
                f"config.json has {list(shape)}"
            )
        if dtype not in _FLOATS:
            raise CheckpointError(
                f"{_label(source, stored[name])} is {dtype}: only float32, bfloat16 and float16 "
                "are supported (quantized checkpoints aren't); give the original"
            )


def _check_extra(extra: Iterable[str], module: nn.Module, prefix: str, tied: bool) -> None:
    """Left-over tensors are refused, save values that the module computes itself (buffers)."""
    computed = {s for name, _ in module.named_buffers() for s in _spellings(name, prefix)}
    # Older checkpoints stored rope frequencies in every layer, and masks that are constants.
    left = sorted(
        name
        for name in extra
        if name not in computed
        and not name.endswith(("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias"))
    )
    if left:
        hint = ""
        if any(name.endswith(("_scale", "_zero_point", "qweight", "scales")) for name in left):
            hint = ": this looks like a quantized checkpoint, which isn't supported"
        raise CheckpointError(
            f"the checkpoint holds {len(left)} tensors that the model built from config.json "
            f"doesn't have, e.g. {left[0]!r}{hint}"
        )


def _describe_missing(missing: list[str], tied: bool) -> str:
    if missing == ["lm_head.weight"] and not tied:
        return (
            "the checkpoint has no 'lm_head.weight' and config.json doesn't tie it to the "
            "embedding: set tie_word_embeddings to true if the model shares them"
        )
    listed = ", ".join(repr(name) for name in missing[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"the checkpoint lacks {listed}{more}, which config.json asks for"

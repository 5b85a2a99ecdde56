"""What a reference function gets: one op's tensors and attributes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch

from ropeway.compiler.errors import RunError

CachePlanes: TypeAlias = Mapping[str, torch.Tensor]
"""A cache at run time: plane name to [num_blocks, block_size, *plane.shape], in its dtype."""


@dataclass(frozen=True)
class Call:
    """One execution of an op.

    Attributes have their defaults filled in and their dims bound to ints. `poison` asks that
    memory the op doesn't write reads as NaN.
    """

    name: str
    operand_names: tuple[str, ...]
    args: Sequence[torch.Tensor | CachePlanes]
    kwargs: Mapping[str, torch.Tensor]
    attrs: Mapping[str, object]
    poison: bool = False

    def _get(self, key: str | int) -> torch.Tensor | CachePlanes:
        if isinstance(key, int):
            return self.args[key]
        if key in self.kwargs:
            return self.kwargs[key]
        return self.args[self.operand_names.index(key)]

    def has(self, name: str) -> bool:
        """Whether an operand is given."""
        return name in self.kwargs or name in self.operand_names

    def raw(self, key: str | int) -> torch.Tensor:
        """An operand tensor as it is stored. Raises RunError for a cache."""
        value = self._get(key)
        if not isinstance(value, torch.Tensor):
            raise RunError(f"{self.name}: operand {key} is a cache, not a tensor")
        return value

    def f32(self, key: str | int) -> torch.Tensor:
        """An operand in float32."""
        return self.raw(key).float()

    def optional(self, name: str) -> torch.Tensor | None:
        """An optional operand in float32, or None."""
        return self.f32(name) if self.has(name) else None

    def cache(self, name: str) -> CachePlanes:
        """A cache operand's planes. Raises RunError for a tensor."""
        value = self._get(name)
        if isinstance(value, torch.Tensor):
            raise RunError(f"{self.name}: operand {name} is a tensor, not a cache")
        return value

    def unwritten(self, *shape: int) -> torch.Tensor:
        """A float32 tensor to write into: NaN when poisoned, else zeros."""
        return torch.full(shape, float("nan") if self.poison else 0.0)

    def integer(self, name: str) -> int:
        """An attribute of kind int or dim."""
        return cast(int, self.attrs[name])

    def number(self, name: str) -> float:
        """An attribute of kind float."""
        return cast(float, self.attrs[name])

    def flag(self, name: str) -> bool:
        """An attribute of kind bool."""
        return cast(bool, self.attrs[name])

    def word(self, name: str) -> str:
        """An attribute of kind str or dtype."""
        return cast(str, self.attrs[name])

    def sizes(self, name: str) -> tuple[int, ...]:
        """An attribute of kind ints or dims."""
        return cast(tuple[int, ...], self.attrs[name])


Reference: TypeAlias = Callable[[Call], Sequence[torch.Tensor]]
"""float32 results, which the interpreter rounds to the declared dtypes."""


def rounded(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A float32 intermediate rounded to the dtype of `like`, back in float32."""
    return tensor.to(like.dtype).float()

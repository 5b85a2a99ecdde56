"""How a torch tensor of the trace looks at an IR operand.

IR activations are token-major ([T, ...], no batch); torch's have a leading batch of 1 and heads
before tokens at times. A View says which IR axis each torch dim is, so that transposes and views of
the batch emit no op. Torch dims of size 1 need not exist in the IR (axis None).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ropeway.compiler.ir.dims import Dim
from ropeway.compiler.ir.graph import Operand
from ropeway.compiler.ir.types import TensorType


@dataclass(frozen=True)
class View:
    """`axes[i]` is the IR axis that torch dim i shows, None for a size of 1 that the IR lacks.

    Every IR axis is shown exactly once. A view that depends on tokens has them as IR axis 0.
    """

    operand: Operand
    axes: tuple[int | None, ...]

    @property
    def type(self) -> TensorType:
        """The IR type of the operand."""
        assert isinstance(self.operand.type, TensorType)  # caches never enter the importer
        return self.operand.type

    @property
    def tokens(self) -> bool:
        """Whether the operand has a token axis (always IR axis 0)."""
        shape = self.type.shape
        return bool(shape) and not isinstance(shape[0], int)

    @property
    def rank(self) -> int:
        """Number of torch dims."""
        return len(self.axes)

    def size(self, dim: int) -> Dim:
        """Size of a torch dim."""
        axis = self.axes[dim]
        return 1 if axis is None else self.type.shape[axis]

    def dim_of(self, axis: int) -> int:
        """The torch dim that shows an IR axis."""
        return self.axes.index(axis)

    def permuted(self, perm: Sequence[int]) -> "View":
        """Torch dims reordered; nothing moves in the IR."""
        return View(self.operand, tuple(self.axes[i] for i in perm))

    def padded(self, rank: int) -> "View":
        """Leading torch dims of size 1 added up to `rank`, as broadcasting does."""
        return View(self.operand, (None,) * (rank - self.rank) + self.axes)

    def in_torch_order(self) -> bool:
        """Whether the IR axes after the token axis come in the order of torch's dims."""
        shown = [axis for axis in self.axes if axis is not None and not (self.tokens and axis == 0)]
        return shown == sorted(shown)


def natural(operand: Operand, rank: int | None = None) -> View:
    """A view whose torch dims are the IR axes in order."""
    kind = operand.type
    assert isinstance(kind, TensorType)
    return View(operand, tuple(range(kind.rank if rank is None else rank)))


@dataclass(frozen=True)
class Group:
    """Old torch dims whose product equals that of new ones, in a reshape."""

    old: tuple[int, ...]
    new: tuple[int, ...]


def reshape_groups(old: Sequence[Dim], new: Sequence[Dim]) -> list[Group] | None:
    """The smallest groups of dims that a reshape maps onto each other, sizes of 1 left out.

    None when a symbolic size would be merged, split or moved.
    """
    groups: list[Group] = []
    i = j = 0
    old_at = [k for k, size in enumerate(old) if size != 1]
    new_at = [k for k, size in enumerate(new) if size != 1]
    while i < len(old_at) and j < len(new_at):
        left, right = [old_at[i]], [new_at[j]]
        a, b = old[left[0]], new[right[0]]
        i, j = i + 1, j + 1
        if not (isinstance(a, int) and isinstance(b, int)):
            if a != b:
                return None
            groups.append(Group(tuple(left), tuple(right)))
            continue
        while a != b:
            if a < b:
                if i == len(old_at) or not isinstance(old[old_at[i]], int):
                    return None
                left.append(old_at[i])
                a, i = a * old[old_at[i]], i + 1
            else:
                if j == len(new_at) or not isinstance(new[new_at[j]], int):
                    return None
                right.append(new_at[j])
                b, j = b * new[new_at[j]], j + 1
        groups.append(Group(tuple(left), tuple(right)))
    return groups if i == len(old_at) and j == len(new_at) else None

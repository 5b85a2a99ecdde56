"""Views: how slice, reshape, transpose and expand lower to no work at all.

A view describes one row of a value: sizes and strides (in elements) of its axes after the leading
one, and a byte offset inside the row of a buffer. The leading axis is the step's rows and never
changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ropeway.compiler.targets.cpu.plan import ITEM_SIZES, ElementType, Ref


@dataclass(frozen=True, slots=True)
class View:
    """A value as it lies in buffer `buffer`."""

    buffer: int
    dtype: ElementType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def ref(self) -> Ref:
        """The operand of a step."""
        return Ref("arena", self.buffer, self.dtype, self.shape, self.strides, self.offset)

    def slice(self, axis: int, start: int, stop: int) -> "View":
        """Elements start..stop of inner axis `axis`."""
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        moved = start * self.strides[axis] * ITEM_SIZES[self.dtype]
        return replace(self, shape=shape, offset=self.offset + moved)

    def transpose(self, perm: Sequence[int]) -> "View":
        """Inner axes in another order."""
        return replace(
            self,
            shape=tuple(self.shape[axis] for axis in perm),
            strides=tuple(self.strides[axis] for axis in perm),
        )

    def expand(self, shape: Sequence[int]) -> "View":
        """Broadcast to `shape`: axes that are new or of size 1 get stride 0."""
        missing = len(shape) - len(self.shape)
        sizes = (1,) * missing + self.shape
        strides = (0,) * missing + self.strides
        spread = tuple(
            0 if old == 1 else stride for old, stride in zip(sizes, strides, strict=True)
        )
        return replace(self, shape=tuple(shape), strides=spread)

    def reshape(self, shape: Sequence[int]) -> "View | None":
        """The same elements in another shape; None when that needs a copy."""
        runs = _merge(self.shape, self.strides)
        strides: list[int] = []
        for size in reversed(shape):
            if size == 1:
                strides.append(1)
                continue
            if not runs or runs[-1][0] % size:
                return None
            length, step = runs.pop()
            strides.append(step)
            if length != size:
                runs.append((length // size, step * size))
        return replace(self, shape=tuple(shape), strides=tuple(reversed(strides)))


def _merge(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """(size, stride) of the longest runs of axes that act as one."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == stride * size:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense row, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))

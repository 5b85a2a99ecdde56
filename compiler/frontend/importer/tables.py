"""Tables of values that depend on the position alone: rope angles, learned positions, scales.

Row p is the value at position p of a sequence that ends there, which is what a decoder sees that
generates token by token; for everything but length-dependent rope that is its value at any length.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from ropeway.compiler.errors import ImportModelError
from ropeway.compiler.frontend.importer.known import KnownGraph
from ropeway.compiler.frontend.importer.locations import describe

_LARGEST = 1 << 31


@dataclass(frozen=True)
class Table:
    """`rows` [P, C] in f32 or i32; `rest` are the sizes above 1 of a position's value, row-major.

    `repeat` says how the columns unfold to prod(rest): "" as they are, "halves" (c, c), "pairs"
    (each column twice in a row): rope tables hold every angle twice, which is kept visible.
    """

    rows: torch.Tensor
    rest: tuple[int, ...]
    repeat: Literal["", "halves", "pairs"] = ""

    @property
    def is_position(self) -> bool:
        """Whether the value is the position itself."""
        if self.rows.is_floating_point() or self.rest or self.rows.shape[1] != 1:
            return False
        return torch.equal(self.rows[:, 0], torch.arange(self.rows.shape[0], dtype=torch.int32))


def position_table(known: KnownGraph, node: fx.Node, dim: int, length: int) -> Table:
    """The table of a known node whose torch dim `dim` is the length, for positions 0..length-1.

    Raises ImportModelError if it would take more than 2 GiB.
    """
    traced = node.meta["val"]
    rest = [int(size) for at, size in enumerate(traced.shape) if at != dim]
    width = 1
    for size in rest:
        width *= size
    if length * width * 4 > _LARGEST:
        raise ImportModelError(
            f"{describe(node)}: a table of {length} positions x {width} values is too large; "
            "give a smaller max_model_len"
        )
    rows = _rows(known, node, dim, length, width)
    rows = rows.to(torch.float32 if rows.is_floating_point() else torch.int32)
    sizes = tuple(size for size in rest if size != 1)
    half = width // 2
    if len(sizes) == 1 and width % 2 == 0 and rows.is_floating_point():
        if torch.equal(rows[:, :half], rows[:, half:]):
            return Table(rows[:, :half].contiguous(), sizes, "halves")
        if torch.equal(rows[:, 0::2], rows[:, 1::2]):
            return Table(rows[:, 0::2].contiguous(), sizes, "pairs")
    return Table(rows, sizes)


def _rows(known: KnownGraph, node: fx.Node, dim: int, length: int, width: int) -> torch.Tensor:
    def at_length(tokens: int) -> torch.Tensor:
        return known.evaluate(node, tokens).movedim(dim, 0).reshape(tokens, width)

    full = at_length(length)
    rows = full.clone()
    _correct(at_length, rows, full, 1, length)
    return rows


def _correct(
    at_length: Callable[[int], torch.Tensor],
    rows: torch.Tensor,
    full: torch.Tensor,
    low: int,
    high: int,
) -> None:
    """Makes rows low-1..high-1 those of sequences that end there.

    `full` is the value at length `high`. Where the value at length `low` agrees with it on their
    common rows, the value doesn't change with the length in between (it would have to change and
    change back); else the interval is halved.
    """
    stack = [(low, high, full)]
    while stack:
        low, high, full = stack.pop()
        short = at_length(low)
        rows[low - 1] = short[low - 1]
        if low + 1 > high:
            continue
        # A tolerance, for vectorized cosines differ in the last bit by where a row lies; changed
        # frequencies show by far more on positions >= 2.
        if low > 2 and torch.allclose(short[:low], full[:low], rtol=1e-6, atol=1e-6):
            rows[low - 1 : high] = full[low - 1 : high]
            continue
        middle = (low + high) // 2
        if middle == low:
            rows[high - 1] = full[high - 1]
            continue
        stack.append((low + 1, middle, at_length(middle)))
        stack.append((middle + 1, high, full))

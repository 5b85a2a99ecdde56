"""Symbolic evaluation of a rotation: which table column times which element of x goes where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ropeway.compiler.ir.graph import Op, Operand, Value
from ropeway.compiler.ir.types import TensorType
from ropeway.compiler.ir.weights import Weight

if TYPE_CHECKING:
    from ropeway.passes.raising.rotation_region import Region


class Unlike(Exception):  # noqa: N818 -- control flow inside the matcher, never seen by a user
    """The region isn't a rotation that nn.rope does; the text says which constraint failed."""


@dataclass(frozen=True)
class Rotation:
    """Pairs of the first `size` dims turn by the angles of `cos` and `sin` (weights [P, ...]).

    `cos_at`, `sin_at`: the column of the first pair; the others follow.
    """

    size: int
    interleaved: bool
    cos: Weight
    sin: Weight
    cos_at: int
    sin_at: int


@dataclass(frozen=True)
class Terms:
    """Summands of every element of a value, one layer each: weight * table[column] * x[element].

    `data` is i64[layers, 4, *shape]: weight (0, 1, -1), table index (-1: none), column, element.
    """

    data: npt.NDArray[np.int64]


class _Evaluator:
    def __init__(self, region: Region, x: Value) -> None:
        self.region = region
        self.x = x
        self.tables: list[Weight] = []
        self._memo: dict[Value, Terms] = {}

    def terms(self, operand: Operand) -> Terms:
        if not isinstance(operand, Value):
            raise Unlike("a weight is part of the rotation")
        if operand not in self._memo:
            self._memo[operand] = self._evaluate(operand)
        return self._memo[operand]

    def _evaluate(self, value: Value) -> Terms:
        shape = _sizes(value)
        if value is self.x:
            size = int(np.prod(shape))
            return _terms(1, -1, -1, np.arange(size).reshape(shape), shape)
        op = value.producer
        if op is None:
            raise Unlike("an input is part of the rotation")
        if op.name == "nn.embedding":
            table = op.args[0]
            assert isinstance(table, Weight)  # so found by the region
            if table not in self.tables:
                self.tables.append(table)
            return _terms(1, self.tables.index(table), np.arange(shape[0]), -1, shape)
        return self._apply(op, shape)

    def _apply(self, op: Op, shape: tuple[int, ...]) -> Terms:
        inputs = [self.terms(arg).data for arg in op.args]
        first = inputs[0]
        if op.name == "tensor.cast":
            return Terms(first)
        if op.name == "math.neg":
            return _scaled(first, -1)
        if op.name == "tensor.reshape":
            return Terms(first.reshape(*first.shape[:2], *shape))
        if op.name == "tensor.expand":
            lead = (1,) * (len(shape) - (first.ndim - 2))
            lined = first.reshape(*first.shape[:2], *lead, *first.shape[2:])
            return Terms(np.broadcast_to(lined, (*first.shape[:2], *shape)))
        return Terms(self._shaped(op, inputs, shape))

    def _shaped(
        self, op: Op, inputs: list[npt.NDArray[np.int64]], shape: tuple[int, ...]
    ) -> npt.NDArray[np.int64]:
        first = inputs[0]
        if op.name == "tensor.transpose":
            perm = [int(axis) for axis in op.attrs["perm"]]  # type: ignore[union-attr]
            if perm[0] != 0:
                raise Unlike("tokens are moved inside the rotation")
            return first.transpose(0, 1, *(axis + 1 for axis in perm[1:]))
        if op.name == "tensor.slice":
            axis, start, stop = (int(op.attrs[key]) for key in ("axis", "start", "stop"))  # type: ignore[arg-type]
            axis %= len(shape) + 1
            return first[(slice(None),) * (axis + 1) + (slice(start, stop),)]
        if op.name == "tensor.concat":
            axis = int(op.attrs["axis"]) % (len(shape) + 1)  # type: ignore[arg-type]
            return np.concatenate(_same_layers(inputs), axis=axis + 1)
        if op.name in ("math.add", "math.sub") and len(inputs) == 2:
            second = inputs[1] if op.name == "math.add" else _scaled(inputs[1], -1).data
            full = [np.broadcast_to(d, (*d.shape[:2], *shape)) for d in (first, second)]
            return np.concatenate(full, axis=0)
        if op.name == "math.mul" and len(inputs) == 2:
            return _product(first, inputs[1], shape)
        raise Unlike(f"{op.name} is part of the rotation")


def _sizes(value: Value) -> tuple[int, ...]:
    """The shape without the token axis."""
    kind = value.type
    if not isinstance(kind, TensorType) or not all(isinstance(n, int) for n in kind.shape[1:]):
        raise Unlike("sizes are fixed but for the tokens")
    return tuple(int(size) for size in kind.shape[1:])


def _terms(
    weight: int, table: int, column: npt.ArrayLike, element: npt.ArrayLike, shape: tuple[int, ...]
) -> Terms:
    data = np.empty((1, 4, *shape), np.int64)
    for index, part in enumerate((weight, table, column, element)):
        data[0, index] = part
    return Terms(data)


def _scaled(data: npt.NDArray[np.int64], factor: int) -> Terms:
    out = data.copy()
    out[:, 0] *= factor
    return Terms(out)


def _same_layers(inputs: list[npt.NDArray[np.int64]]) -> list[npt.NDArray[np.int64]]:
    """Missing layers filled with summands of weight 0."""
    layers = max(data.shape[0] for data in inputs)
    return [
        np.concatenate([data, np.zeros((layers - data.shape[0], *data.shape[1:]), np.int64)])
        for data in inputs
    ]


def _product(
    a: npt.NDArray[np.int64], b: npt.NDArray[np.int64], shape: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """A factor from x by a factor from a table (a single layer), broadcast."""
    if (b[:, 3] >= 0).any():
        a, b = b, a
    if b.shape[0] != 1 or (b[:, 3] >= 0).any() or (a[:, 1] >= 0).any():
        raise Unlike("a product inside the rotation is of x with one table")
    a = np.broadcast_to(a, (*a.shape[:2], *shape))
    b = np.broadcast_to(b, (*b.shape[:2], *shape))
    out = a.copy()
    out[:, 0] *= b[:, 0]
    out[:, 1:3] = b[:, 1:3]
    return out


Summand = tuple[int, int, int, int]


def read_rotation(region: Region, root: Value, x: Value) -> Rotation:
    """How `root` is rotated from `x`, both [T, H, D]. Raises Unlike."""
    evaluator = _Evaluator(region, x)
    data = evaluator.terms(root).data
    if data.ndim == 3:  # a single head without an axis of its own
        data = data[:, :, None]
    if data.ndim != 4:
        raise Unlike("the rotated value has heads [T, H, D]")
    heads, dims = data.shape[2:]
    present = data[:, 0] != 0
    owner = np.broadcast_to(np.arange(heads)[:, None], (heads, dims))
    if (present & (data[:, 3] // dims != owner)).any():
        raise Unlike("every head is rotated by itself")
    inside = np.where(present[:, None], data, 0)
    inside[:, 3] %= dims
    if (inside != inside[:, :, :1]).any():
        raise Unlike("all heads are rotated alike")
    rows = [_summands(inside[:, :, 0, dim]) for dim in range(dims)]
    size = sum(1 for row in rows if len(row) == 2)
    if size == 0 or size % 2 or any(len(row) != 2 for row in rows[:size]):
        raise Unlike("the first dims are rotated, each by a cosine and a sine")
    for dim in range(size, dims):
        if rows[dim] != [(1, -1, -1, dim)]:
            raise Unlike("dims that aren't rotated pass unchanged")
    return _paired(rows[:size], evaluator.tables)


def _summands(data: npt.NDArray[np.int64]) -> list[Summand]:
    return [tuple(int(n) for n in layer) for layer in data if layer[0] != 0]  # type: ignore[misc]


def _paired(rows: list[list[Summand]], tables: list[Weight]) -> Rotation:
    size = len(rows)
    for interleaved in (False, True):
        turned = [_turn(rows, pair, interleaved) for pair in range(size // 2)]
        found = [turn for turn in turned if turn is not None]
        if len(found) < len(turned):
            continue
        (cos, cos_at, sin, sin_at), *_ = found
        expected = [(cos, cos_at + pair, sin, sin_at + pair) for pair in range(size // 2)]
        if found != expected:
            raise Unlike("pairs take the columns of one cosine and one sine table in order")
        return Rotation(size, interleaved, tables[cos], tables[sin], cos_at, sin_at)
    raise Unlike("pairs (i, i + R/2) or (2i, 2i + 1) turn by (cos, -sin), (sin, cos)")


def _turn(
    rows: list[list[Summand]], pair: int, interleaved: bool
) -> tuple[int, int, int, int] | None:
    """(cosine table, column, sine table, column) of one pair, or None if it isn't a turn."""
    half = len(rows) // 2
    a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
    own = {element: (w, table, column) for w, table, column, element in rows[a]}
    other = {element: (w, table, column) for w, table, column, element in rows[b]}
    if set(own) != {a, b} or set(other) != {a, b}:
        return None
    cos, minus_sin = own[a], own[b]
    if other[b] != cos or other[a] != (-minus_sin[0], *minus_sin[1:]):
        return None
    if cos[0] != 1 or minus_sin[0] != -1 or cos[1] < 0 or minus_sin[1] < 0:
        return None
    return cos[1], cos[2], minus_sin[1], minus_sin[2]

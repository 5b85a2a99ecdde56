"""Which ops of a function mix values with tables looked up by position."""

from __future__ import annotations

from dataclasses import dataclass

from ropeway.compiler.ir.graph import Function, Op, Value
from ropeway.compiler.ir.rewrite import Rewriter
from ropeway.compiler.ir.types import DType, TensorType
from ropeway.compiler.ir.weights import Weight
from ropeway.passes.raising.rotation import Unlike

MOVES = frozenset(
    {
        "tensor.reshape",
        "tensor.cast",
        "tensor.concat",
        "tensor.slice",
        "tensor.transpose",
        "tensor.expand",
        "math.neg",
    }
)


@dataclass(frozen=True)
class Region:
    """The ops behind `root` that mix tables in.

    `values` are results of such ops; `tables` values that depend on positions alone.
    """

    root: Value
    values: frozenset[Value]
    tables: frozenset[Value]
    order: dict[Value, int]

    def source(self, root: Value) -> Value:
        """The value that the region rotates: of root's type, behind everything it reads.

        The latest value from which all that the region reads is cut, negated and moved. Raises
        Unlike when there is none.
        """
        common: set[Value] | None = None
        for leaf in self._leaves(root):
            behind = _behind(leaf)
            common = behind if common is None else common & behind
        fitting = [value for value in common or () if value.type == root.type]
        if not fitting:
            raise Unlike("what is rotated is one value [T, H, D] of the result's type")
        return max(fitting, key=lambda value: self.order.get(value, -1))

    def _leaves(self, root: Value) -> list[Value]:
        found: list[Value] = []
        stack, seen = [root], {root}
        while stack:
            op = stack.pop().producer
            assert op is not None  # values of a region are computed
            for operand in op.args:
                if not isinstance(operand, Value) or operand in seen or operand in self.tables:
                    continue
                seen.add(operand)
                (stack if operand in self.values else found).append(operand)
        return found


def _behind(leaf: Value) -> set[Value]:
    """The leaf and everything it is cut, negated or moved from."""
    seen = {leaf}
    stack = [leaf]
    while stack:
        op = stack.pop().producer
        if op is None or op.name not in MOVES:
            continue
        for operand in op.args:
            if isinstance(operand, Value) and operand not in seen:
                seen.add(operand)
                stack.append(operand)
    return seen


def find_regions(function: Function, rewriter: Rewriter, positions: Value) -> list[Region]:
    """One region for each value that mixes tables in and is read outside of such ops."""
    tables: set[Value] = set()
    mixed: set[Value] = set()
    order: dict[Value, int] = {}
    for index, op in enumerate(function.ops):
        for result in op.results:
            order[result] = index
        if _is_table(op, positions, tables):
            tables.update(op.results)
        elif _is_mixed(op, tables, mixed):
            mixed.update(op.results)
    frozen = frozenset(mixed), frozenset(tables)
    roots = sorted(mixed, key=order.__getitem__)
    return [
        Region(root, *frozen, order)
        for root in roots
        if rewriter.is_output(root)
        or any(not mixed.intersection(user.results) for user in rewriter.users(root))
    ]


def _is_table(op: Op, positions: Value, tables: set[Value]) -> bool:
    if op.name == "nn.embedding":
        table = op.args[0]
        known = isinstance(table, Weight) and table.type.dtype == DType.F32
        return known and op.args[1] is positions
    return op.name in MOVES and bool(op.args) and all(arg in tables for arg in op.args)


def _is_mixed(op: Op, tables: set[Value], mixed: set[Value]) -> bool:
    from_table = [arg for arg in op.args if arg in tables]
    from_mixed = [arg for arg in op.args if arg in mixed]
    if op.name == "math.mul" and len(op.args) == 2:
        other = [arg for arg in op.args if arg not in tables]
        return len(from_table) == 1 and not from_mixed and _has_rows(other[0])
    if op.name in ("math.add", "math.sub"):
        return len(op.args) == 2 and len(from_mixed) == 2
    return op.name in MOVES and op.name != "tensor.expand" and bool(from_mixed) and not from_table


def _has_rows(operand: object) -> bool:
    kind = operand.type if isinstance(operand, Value) else None
    return isinstance(kind, TensorType) and kind.rank >= 2

"""Collects the parts of a plan template while ops are lowered one by one."""

from collections.abc import Sequence
from typing import get_args

from ropeway.compiler.errors import TargetError
from ropeway.compiler.ir.dims import Dim, print_dim
from ropeway.compiler.ir.graph import Function, Op, Operand, Value
from ropeway.compiler.ir.types import CacheType, TensorType
from ropeway.compiler.ir.weights import Apply, Weight
from ropeway.compiler.targets.cpu.aliasing import Aliasing
from ropeway.compiler.targets.cpu.kernel_table import MAX_DIMS
from ropeway.compiler.targets.cpu.plan import (
    ALIGNMENT,
    ITEM_SIZES,
    Buffer,
    CacheSlot,
    ElementType,
    Layout,
    Ref,
    RowKind,
    Step,
    WeightSlot,
)
from ropeway.compiler.targets.cpu.views import View, contiguous_strides

_ROWS: dict[str, RowKind] = {"T": "tokens", "R": "requests", "L": "rows"}
_LAYOUTS: dict[str, Layout] = {name: name for name in get_args(Layout)}
_ELEMENTS: dict[str, ElementType] = {"f32": "f32", "bf16": "bf16", "i32": "i32"}


def describe(op: Op) -> str:
    """The op as errors and profiles name it."""
    return f"{op.name} at {op.loc}" if op.loc else op.name


def refuse(op: Op, why: str, step: str = "compile for target reference") -> TargetError:
    """The error for an op that the target can't take."""
    return TargetError(f"target cpu can't lower {describe(op)}: {why}: {step}")


def row_kind(op: Op, kind: TensorType) -> RowKind:
    """Which true count the leading axis of a value is."""
    leading: Dim = kind.shape[0] if kind.shape else 1
    rows = _ROWS.get(print_dim(leading))
    if rows is None:
        raise refuse(op, f"{kind} doesn't start with the tokens, requests or rows of the step")
    return rows


def inner_shape(op: Op, kind: TensorType) -> tuple[int, ...]:
    """Sizes of the axes after the leading one."""
    inner = kind.shape[1:]
    if not all(isinstance(size, int) for size in inner) or len(inner) >= MAX_DIMS:
        raise refuse(op, f"{kind} has an axis of unknown size after the first, or too many axes")
    return tuple(int(size) for size in inner)


def element_type(op: Op, kind: TensorType) -> ElementType:
    """The plan's name of an element type."""
    found = _ELEMENTS.get(kind.dtype.value)
    if found is None:
        raise refuse(op, f"{kind.dtype.value} isn't supported", "compile with bfloat16 or float32")
    return found


class PlanBuilder:
    """Buffers, weights, inputs, caches and steps in the order of their first use."""

    def __init__(self, function: Function) -> None:
        self.aliasing = Aliasing(function)
        self.buffers: list[Buffer] = []
        self.weights: list[WeightSlot] = []
        self.inputs: list[str] = []
        self.caches: list[CacheSlot] = []
        self.steps: list[Step] = []
        self._views: dict[Value, View] = {}
        self._weight_numbers: dict[str, int] = {}
        self._roles: dict[Value, str] = {}
        self._cache_numbers: dict[Value, int] = {}

    # --- values ---

    def define(self, value: Value, view: View) -> View:
        """`value` is this view from now on."""
        self._views[value] = view
        return view

    def view(self, op: Op, operand: Operand) -> View:
        """The view of a value that an earlier op made."""
        if isinstance(operand, Weight):
            raise refuse(op, f"operand @{operand.name} is a weight where a value is wanted")
        found = self._views.get(operand)
        if found is None:
            raise refuse(op, f"operand %{operand.name} isn't the result of an op")
        return found

    def new_view(self, op: Op, rows: RowKind, dtype: ElementType, shape: Sequence[int]) -> View:
        """A view of a fresh buffer that holds dense rows of `shape`."""
        strides = contiguous_strides(shape)
        items = 1
        for size in shape:
            items *= size
        # An odd number of cache lines: rows at even strides fall into few cache sets, which made
        # matrix products over 16 rows 5 to 10% slower, and 40% at powers of two.
        row_bytes = (-(-items * ITEM_SIZES[dtype] // ALIGNMENT) | 1) * ALIGNMENT
        if row_bytes >= 1 << 31:
            raise refuse(op, f"a row of {row_bytes} bytes is too long")
        self.buffers.append(Buffer(rows, row_bytes))
        return View(len(self.buffers) - 1, dtype, tuple(shape), strides)

    def result(self, op: Op, number: int = 0) -> View:
        """A fresh buffer for a result of `op`."""
        value = op.results[number]
        kind = tensor_type(op, value)
        rows, dtype = row_kind(op, kind), element_type(op, kind)
        return self.define(value, self.new_view(op, rows, dtype, inner_shape(op, kind)))

    def dense(self, op: Op, operand: Operand, shape: Sequence[int] | None = None) -> View:
        """The operand with adjacent elements, reshaped to `shape`: copied only if need be."""
        view = self.view(op, operand)
        wanted = tuple(shape) if shape is not None else view.shape
        if view.ref.adjacent:
            reshaped = view.reshape(wanted)
            if reshaped is not None:
                return reshaped
        copied = self.copy(op, view)
        return View(copied.buffer, copied.dtype, wanted, contiguous_strides(wanted))

    def copy(self, op: Op, view: View) -> View:
        """A dense copy of a view in a fresh buffer."""
        rows = self.buffers[view.buffer].rows
        fresh = self.new_view(op, rows, view.dtype, view.shape)
        self.step("unary", op, rows, {"x": view.ref, "y": fresh.ref}, {"op": "copy"})
        return fresh

    # --- everything else that an op reads ---

    def weight(self, op: Op, operand: Operand, layout: Layout | None = None) -> Ref:
        """A weight operand; `layout` is the one that the kernel needs, None for any."""
        if not isinstance(operand, Weight):
            raise refuse(op, f"operand %{operand.name} must be a weight")
        expr, found = operand.expr, _LAYOUTS["rows"]
        if isinstance(expr, Apply) and expr.fn == "pack":
            found = _LAYOUTS[str(expr.attr["layout"])]
        if layout is not None and layout != found:
            raise refuse(
                op, f"@{operand.name} has layout {found}, not {layout}", "run the pass pack-weights"
            )
        number = self._weight_numbers.get(operand.name)
        kind = operand.type
        if number is None:
            shape = (0, *kind.shape)
            sizes = inner_shape(op, TensorType(kind.dtype, shape))
            number = self._weight_numbers[operand.name] = len(self.weights)
            dtype = element_type(op, kind)
            slot = WeightSlot(operand.name, dtype, sizes, found)
            self.weights.append(slot)
        slot = self.weights[number]
        if found != "rows":
            return Ref("weights", number, slot.dtype)
        return Ref("weights", number, slot.dtype, slot.shape, contiguous_strides(slot.shape))

    def bind_input(self, value: Value, role: str) -> None:
        """A function input that the runtime fills."""
        self._roles[value] = role

    def input(self, op: Op, operand: Operand) -> Ref:
        """A function input operand."""
        role = self._roles.get(operand) if isinstance(operand, Value) else None
        if role is None:
            raise refuse(op, f"operand {operand.name} must be a function input with a role")
        if role not in self.inputs:
            self.inputs.append(role)
        return Ref("input", self.inputs.index(role), "i32")

    def bind_cache(self, value: Value) -> None:
        """A cache input: one layer's K and V planes."""
        kind = value.type
        keys = kind.plane("k") if isinstance(kind, CacheType) else None
        values = kind.plane("v") if isinstance(kind, CacheType) else None
        if not isinstance(kind, CacheType) or keys is None or values is None:
            raise TargetError(
                f"target cpu can't keep %{value.name}: {value.type}: it needs planes k and v of "
                f"[heads, head_dim]: compile for target reference"
            )
        slot = CacheSlot(
            name=value.name,
            group=kind.group,
            heads=keys.shape[0],
            key_dim=keys.shape[1],
            value_dim=values.shape[1],
            dtype=_ELEMENTS.get(keys.dtype.value, "i32"),
        )
        self._cache_numbers[value] = len(self.caches)
        self.caches.append(slot)

    def cache(self, op: Op, operand: Operand) -> Ref:
        """A cache operand."""
        number = self._cache_numbers.get(operand) if isinstance(operand, Value) else None
        if number is None:
            raise refuse(op, f"operand {operand.name} must be a cache input")
        return Ref("cache", number, self.caches[number].dtype)

    def step(
        self,
        kernel: str,
        op: Op,
        rows: RowKind,
        operands: dict[str, Ref],
        params: dict[str, int | float | str] | None = None,
    ) -> None:
        """Append a kernel call."""
        self.steps.append(Step(kernel, describe(op), rows, operands, params or {}))

    def rows_of(self, view: View) -> RowKind:
        """The row kind of a view's buffer."""
        return self.buffers[view.buffer].rows


def tensor_type(op: Op, operand: Operand) -> TensorType:
    """The tensor type of an operand. Raises TargetError for a cache."""
    if not isinstance(operand.type, TensorType):
        raise refuse(op, f"operand {operand.name} is a {operand.type}")
    return operand.type

"""Emits IR while a traced graph is interpreted: weights, constants, tables, ops.

`materialize` turns what doesn't depend on tokens into operands: a value without a length becomes a
constant, one by position a table looked up with the positions.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ropeway.compiler.errors import ImportModelError
from ropeway.compiler.frontend.importer.known import KnownGraph
from ropeway.compiler.frontend.importer.locations import describe, location, module_path
from ropeway.compiler.frontend.importer.tables import Table, position_table
from ropeway.compiler.frontend.importer.view import View
from ropeway.compiler.ir.dims import Dim, symbol
from ropeway.compiler.ir.graph import Function, Input, Module, Operand, Value
from ropeway.compiler.ir.types import DType, TensorType
from ropeway.compiler.ir.weights import Apply, Ckpt, Const, Weight, WeightExpr, apply
from ropeway.compiler.ops.registry import build

DTYPES = {
    torch.float32: DType.F32,
    torch.bfloat16: DType.BF16,
    torch.float16: DType.F16,
    torch.int32: DType.I32,
    torch.int64: DType.I32,
    torch.bool: DType.BOOL,
}
TOKENS = symbol("T")


class Builder:
    """The module being built, and what of the trace has a place in it already."""

    def __init__(self, module: Module, function: Function, known: KnownGraph, length: int) -> None:
        self.module = module
        self.function = function
        self.known = known
        self.length = length
        self.constants: dict[str, torch.Tensor] = {}
        self.node: fx.Node | None = None
        self._tables: dict[fx.Node, View] = {}
        ids = Value("ids", TensorType(DType.I32, (TOKENS,)))
        self.positions = Value("positions", TensorType(DType.I32, (TOKENS,)))
        self.ids = View(ids, (None, 0))
        function.inputs = [Input(ids, "ids"), Input(self.positions, "positions")]

    def fail(self, problem: str) -> ImportModelError:
        """The error for the node at hand: op, source line, what is wrong."""
        where = describe(self.node) if self.node is not None else self.module.name
        return ImportModelError(f"{where}: {problem}")

    def emit(
        self,
        name: str,
        args: Sequence[Operand],
        attrs: Mapping[str, object] | None = None,
        kwargs: Mapping[str, Operand | None] | None = None,
    ) -> Value:
        """Appends an op and returns its result."""
        loc, wish = "", name.rpartition(".")[2]
        if self.node is not None:
            loc = location(self.node)
            wish = _value_name(module_path(self.node), wish)
        op = build(self.function, name, args, kwargs, attrs, loc=loc, names=[wish])
        return op.result

    def weight(self, name: str, kind: TensorType, expr: WeightExpr) -> Weight:
        """The module's weight of this name, added if it is new."""
        if name not in self.module.weights:
            self.module.add_weight(Weight(name, kind, expr))
        return self.module.weights[name]

    def derived(self, weight: Weight, fn: str, to: tuple[int, ...], /, **attrs: object) -> Weight:
        """A weight computed from another one by a weight function."""
        expr: Apply = apply(fn, weight.expr, **attrs)
        tag = hashlib.sha256(repr(expr).encode()).hexdigest()[:6]
        name = f"{weight.name}.{fn}_{tag}"
        return self.weight(name, TensorType(weight.type.dtype, to), expr)

    def constant(self, value: torch.Tensor, hint: str) -> Weight:
        """A constant of the module; equal tensors share one."""
        value = value.contiguous()
        if value.dtype == torch.int64:
            value = value.to(torch.int32)
        digest = hashlib.sha256(value.numpy().tobytes() + repr(value.shape).encode()).hexdigest()
        for name, own in self.constants.items():
            if own.shape == value.shape and own.dtype == value.dtype and torch.equal(own, value):
                return self.module.weights[name]
        name = hint if hint not in self.module.weights else f"{hint}.{digest[:8]}"
        self.constants[name] = value
        kind = TensorType(DTYPES[value.dtype], tuple(value.shape))
        return self.weight(name, kind, Const(name))

    def dims(self, value: torch.Tensor) -> tuple[Dim, ...]:
        """A traced shape with torch's symbol replaced by T."""
        return tuple(self.dim(size) for size in value.shape)

    def dim(self, size: int | torch.SymInt) -> Dim:
        """One traced size as a Dim."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression.is_Integer:
            return int(expression)
        return expression.subs({s: TOKENS for s in expression.free_symbols})

    def dtype(self, value: torch.Tensor) -> DType:
        """IR dtype of a traced tensor."""
        kind = DTYPES.get(value.dtype)
        if kind is None:
            raise self.fail(f"element type {value.dtype} isn't supported: use float32 or bfloat16")
        return kind

    def materialize(self, node: fx.Node) -> View:
        """A known node as an operand: a constant, or a lookup by position."""
        if node not in self._tables:
            shape = self.dims(node.meta["val"])
            at = [dim for dim, size in enumerate(shape) if not isinstance(size, int)]
            if not at:
                self._tables[node] = self._constant_view(node)
            elif len(at) == 1 and shape[at[0]] == TOKENS:
                self._tables[node] = self._lookup(node, at[0])
            else:
                raise self.fail(
                    f"a value by pairs of tokens ({describe(node)}) is used outside of attention; "
                    "only masks given to scaled_dot_product_attention may be"
                )
        return self._tables[node]

    def _constant_view(self, node: fx.Node) -> View:
        value = self.known.evaluate(node, self.length)
        weight = self.constant(value, _known_name(node))
        return self.cast(View(weight, tuple(range(value.dim()))), self.dtype(node.meta["val"]))

    def _lookup(self, node: fx.Node, dim: int) -> View:
        table = position_table(self.known, node, dim, self.length)
        looked_up = self._looked_up_rows(table, node)
        axes: list[int | None] = []
        axis = 1
        for at, size in enumerate(node.meta["val"].shape):
            if at == dim:
                axes.append(0)
            elif isinstance(size, int) and size == 1:
                axes.append(None)
            else:
                axes.append(axis)
                axis += 1
        view = View(looked_up, tuple(axes))
        return self.cast(view, self.dtype(node.meta["val"]))

    def _looked_up_rows(self, table: Table, node: fx.Node) -> Value:
        """[T, *rest] of a table whose rows are unfolded columns."""
        if table.is_position:
            return self.positions
        weight = self.constant(table.rows, _known_name(node))
        rows = self.emit("nn.embedding", [weight, self.positions])
        width = int(table.rows.shape[1])
        if table.repeat == "halves":
            rows = self.emit("tensor.concat", [rows, rows], {"axis": 1})
        elif table.repeat == "pairs":
            split = self.emit("tensor.reshape", [rows], {"shape": (TOKENS, width, 1)})
            twice = self.emit("tensor.expand", [split], {"shape": (TOKENS, width, 2)})
            rows = self.emit("tensor.reshape", [twice], {"shape": (TOKENS, 2 * width)})
        if len(table.rest) != 1:
            rows = self.emit("tensor.reshape", [rows], {"shape": (TOKENS, *table.rest)})
        return rows

    def parameter(self, name: str, value: torch.Tensor, stored: DType) -> View:
        """A parameter (or a buffer that the checkpoint holds) as a weight of the traced dtype."""
        wanted = self.dtype(value)
        expr: WeightExpr = Ckpt(name)
        if stored != wanted:
            expr = apply("cast", expr, dtype=wanted.value)
        shape = tuple(int(size) for size in value.shape)
        return View(self.weight(name, TensorType(wanted, shape), expr), tuple(range(len(shape))))

    def cast(self, view: View, dtype: DType) -> View:
        """The view in another dtype; a weight is cast where it is defined."""
        if view.type.dtype == dtype:
            return view
        if isinstance(view.operand, Weight):
            name = f"{view.operand.name}.{dtype.value}"
            expr = apply("cast", view.operand.expr, dtype=dtype.value)
            return View(self.weight(name, TensorType(dtype, view.type.shape), expr), view.axes)
        return View(self.emit("tensor.cast", [view.operand], {"dtype": dtype.value}), view.axes)

    def reshaped(self, operand: Operand, shape: tuple[Dim, ...]) -> Operand:
        """An operand reshaped; weights by their expression, the rest by an op."""
        kind = operand.type
        if isinstance(kind, TensorType) and kind.shape == shape:
            return operand
        if isinstance(operand, Weight):
            fixed = tuple(int(size) for size in shape)
            return self.derived(operand, "reshape", fixed, shape=fixed)
        return self.emit("tensor.reshape", [operand], {"shape": shape})

    def transposed(self, operand: Operand, perm: Sequence[int]) -> Operand:
        """An operand with its axes permuted; weights by their expression."""
        if list(perm) == list(range(len(perm))):
            return operand
        if isinstance(operand, Weight):
            shape = tuple(int(operand.type.shape[axis]) for axis in perm)
            return self.derived(operand, "transpose", shape, perm=tuple(perm))
        return self.emit("tensor.transpose", [operand], {"perm": tuple(perm)})

    def in_torch_order(self, view: View) -> View:
        """The same torch tensor over an operand whose axes follow torch's dims, tokens first."""
        if view.in_torch_order():
            return view
        shown = [axis for axis in view.axes if axis is not None]
        rest = [axis for axis in shown if not (view.tokens and axis == 0)]
        order = [0, *rest] if view.tokens else rest
        moved = self.transposed(view.operand, order)
        return View(moved, tuple(None if a is None else order.index(a) for a in view.axes))

    def with_axis(self, view: View, dim: int) -> View:
        """The same torch tensor, whose torch dim `dim` certainly is an IR axis."""
        if view.axes[dim] is not None:
            return view
        before = [axis for axis in view.axes[:dim] if axis is not None]
        at = max(before, default=-1) + 1
        if view.tokens:
            at = max(at, 1)
        shape = view.type.shape
        operand = self.reshaped(view.operand, (*shape[:at], 1, *shape[at:]))
        axes = [a + 1 if a is not None and a >= at else a for a in view.axes]
        axes[dim] = at
        return View(operand, tuple(axes))


def _known_name(node: fx.Node) -> str:
    """`model.rotary_emb.cos`: after the op that computes a known value, not those that shape it."""
    shaping = ("unsqueeze", "to", "alias", "expand", "slice", "_to_copy", "contiguous", "view")
    while node.op == "call_function" and isinstance(node.args[0], fx.Node):
        name = str(getattr(node.target, "overloadpacket", "")).removeprefix("aten.")
        scaled = name == "mul" and not isinstance(node.args[1], fx.Node)
        if name not in shaping and not scaled:
            break
        node = node.args[0]
    op = str(getattr(node.target, "overloadpacket", node.name)).removeprefix("aten.")
    return f"{module_path(node) or 'model'}.{op}"


def _value_name(path: str, wish: str) -> str:
    """`l3.q_proj` for a value made in model.layers.3.self_attn.q_proj."""
    parts = path.split(".") if path else []
    layer = next((f"l{part}" for part in parts if part.isdigit()), "")
    last = next((part for part in reversed(parts) if not part.isdigit()), "")
    names = [layer, last if last not in ("layers", "h", "model") else "", wish]
    if last.endswith("proj") and wish == "linear":
        names.pop()
    return ".".join(name for name in names if name)

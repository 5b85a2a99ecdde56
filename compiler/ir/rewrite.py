"""Edits of one function that keep the record of who uses what right."""

from collections.abc import Sequence

from ropeway.compiler.errors import InputError
from ropeway.compiler.ir.graph import Function, Module, NamePool, Op, Operand, OperandKey, Value
from ropeway.compiler.ir.weights import Weight


class Rewriter:
    """The editing hand of a pass on one function.

    While a Rewriter is in use, all edits of the function's ops go through it (attributes and
    types may be written directly). Uses by the function's outputs aren't `uses`; see `is_output`.
    """

    def __init__(self, function: Function, module: Module) -> None:
        self.function = function
        self.module = module
        self._names = NamePool(value.name for value in function.values())
        self._weight_names = NamePool(module.weights)
        # Insertion-ordered, so that passes see uses in a fixed order.
        self._uses: dict[Operand, dict[tuple[Op, OperandKey], None]] = {}
        for op in function.ops:
            self._record(op)

    def _record(self, op: Op) -> None:
        for key, operand in op.operands():
            self._uses.setdefault(operand, {})[op, key] = None

    def _forget(self, op: Op) -> None:
        for key, operand in op.operands():
            self._uses[operand].pop((op, key), None)

    def uses(self, operand: Operand) -> list[tuple[Op, OperandKey]]:
        """Every (op, key) that reads a value or weight."""
        return list(self._uses.get(operand, ()))

    def users(self, operand: Operand) -> list[Op]:
        """The ops that read it, each once."""
        return list(dict.fromkeys(op for op, _ in self._uses.get(operand, ())))

    def is_output(self, value: Value) -> bool:
        """Whether the function returns it."""
        return any(value is output for output, _ in self.function.outputs)

    def is_dead(self, value: Value) -> bool:
        """Whether nothing reads it and the function doesn't return it."""
        return not self._uses.get(value) and not self.is_output(value)

    def single_user(self, value: Value) -> Op | None:
        """The op of the only use, or None with several uses, none, or a use as an output."""
        uses = self._uses.get(value, {})
        if len(uses) != 1 or self.is_output(value):
            return None
        return next(iter(uses))[0]

    def fresh(self, base: str) -> str:
        """An unused value name like `base`."""
        return self._names.fresh(base)

    def fresh_weight(self, base: str) -> str:
        """An unused weight name like `base`."""
        return self._weight_names.fresh(base)

    def set_operand(self, op: Op, key: OperandKey, operand: Operand) -> None:
        """Makes `op` read `operand` at `key`."""
        old = op.args[key] if isinstance(key, int) else op.kwargs.get(key)
        if old is not None:
            self._uses[old].pop((op, key), None)
        op.set_operand(key, operand)
        self._uses.setdefault(operand, {})[op, key] = None

    def replace(self, old: Operand, new: Operand) -> None:
        """Every use of `old`, as an output too, becomes one of `new`.

        Raises InputError when an output would become a weight.
        """
        if isinstance(new, Weight) and isinstance(old, Value) and self.is_output(old):
            raise InputError(f"%{old.name} is an output, which @{new.name} can't be: keep an op")
        for op, key in self.uses(old):
            self.set_operand(op, key, new)
        if isinstance(new, Value):
            outputs = self.function.outputs
            outputs[:] = [(new if value is old else value, role) for value, role in outputs]

    def insert_before(self, anchor: Op, *new_ops: Op) -> None:
        """Inserts ops, in order, before `anchor`."""
        self._insert(self._index(anchor), new_ops)

    def insert_after(self, anchor: Op, *new_ops: Op) -> None:
        """Inserts ops, in order, after `anchor`."""
        self._insert(self._index(anchor) + 1, new_ops)

    def append(self, *new_ops: Op) -> None:
        """Inserts ops at the end of the function."""
        self._insert(len(self.function.ops), new_ops)

    def _insert(self, index: int, new_ops: Sequence[Op]) -> None:
        self.function.ops[index:index] = new_ops
        for op in new_ops:
            self._record(op)
            for result in op.results:
                self._names.add(result.name)

    def _index(self, op: Op) -> int:
        for index, candidate in enumerate(self.function.ops):
            if candidate is op:
                return index
        raise InputError(f"{op!r} isn't in @{self.function.name}: it was erased or never inserted")

    def erase(self, op: Op) -> None:
        """Removes an op. Raises InputError while one of its results is in use."""
        for result in op.results:
            if not self.is_dead(result):
                raise InputError(f"%{result.name} is still in use: replace it before erasing")
        self.function.ops.pop(self._index(op))
        self._forget(op)

    def replace_op(self, op: Op, values: Sequence[Operand]) -> None:
        """Replaces every result of `op` by the value of the same place, and erases `op`."""
        if len(values) != len(op.results):
            raise InputError(f"{op!r} has {len(op.results)} results, not {len(values)}")
        for result, value in zip(op.results, values, strict=True):
            self.replace(result, value)
        self.erase(op)

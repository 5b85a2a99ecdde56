"""The IR's objects: module, function, op and value. Functions are flat and in SSA form.

Values, ops and weights are compared by identity; modules compare by structure, names included.
An op's results know their producer; who uses a value is the Rewriter's to know.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from ropeway.compiler.errors import InputError
from ropeway.compiler.ir.attrs import Attr, attr_key, normalize_attr
from ropeway.compiler.ir.types import Type
from ropeway.compiler.ir.weights import Weight


@dataclass(eq=False)
class Value:
    """One SSA value, printed `%name`; `producer` is None for a function input."""

    name: str
    type: Type
    producer: "Op | None" = None

    def __repr__(self) -> str:
        return f"<value %{self.name}: {self.type}>"


Operand: TypeAlias = Value | Weight
OperandKey: TypeAlias = int | str
"""Where an op uses an operand: its position in `args`, or its name in `kwargs`."""


@dataclass(eq=False)
class Op:
    """One operation.

    `args` are the required (or variadic) operands in order, `kwargs` the optional ones by name;
    `loc` is the line of the model's source, or "".
    """

    name: str
    args: list[Operand] = field(default_factory=list)
    kwargs: dict[str, Operand] = field(default_factory=dict)
    attrs: dict[str, Attr] = field(default_factory=dict)
    results: list[Value] = field(default_factory=list)
    loc: str = ""

    def __post_init__(self) -> None:
        self.attrs = {key: normalize_attr(value) for key, value in self.attrs.items()}
        for result in self.results:
            result.producer = self

    def __repr__(self) -> str:
        return f"<op {', '.join('%' + r.name for r in self.results)} = {self.name}>"

    @property
    def result(self) -> Value:
        """The only result. Raises InputError when there isn't exactly one."""
        if len(self.results) != 1:
            raise InputError(f"{self.name} has {len(self.results)} results: name the one you mean")
        return self.results[0]

    def operands(self) -> Iterator[tuple[OperandKey, Operand]]:
        """Every operand with its key, the positional ones first."""
        yield from enumerate(self.args)
        yield from self.kwargs.items()

    def set_operand(self, key: OperandKey, operand: Operand) -> None:
        """Replaces one operand (a Rewriter's `set_operand` also keeps its uses right)."""
        if isinstance(key, int):
            self.args[key] = operand
        else:
            self.kwargs[key] = operand


@dataclass(eq=False)
class Input:
    """A function input and the role by which the runtime fills it ("" for none)."""

    value: Value
    role: str = ""


class NamePool:
    """Names in use, and fresh ones like a given base: `x`, `x_1`, `x_2`, ..."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._next: dict[str, int] = {}

    def add(self, name: str) -> None:
        """Marks a name as used."""
        self._taken.add(name)

    def fresh(self, base: str) -> str:
        """A name that wasn't in use; it is from now on."""
        name, count = base, self._next.get(base, 0)
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._next[base] = count
        self._taken.add(name)
        return name


@dataclass(eq=False)
class Function:
    """A flat list of ops; `outputs` pairs each output value with its role ("" for none)."""

    name: str
    inputs: list[Input] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    outputs: list[tuple[Value, str]] = field(default_factory=list)
    loc: str = ""
    _names: NamePool = field(default_factory=NamePool, init=False, repr=False)
    _named: int = field(default=-1, init=False, repr=False)

    def append(self, op: Op) -> Op:
        """Adds `op` at the end."""
        pooled = self._named == self._size()
        self.ops.append(op)
        if pooled:
            for result in op.results:
                self._names.add(result.name)
            self._named = self._size()
        return op

    def values(self) -> Iterator[Value]:
        """Inputs, then every op's results, in order."""
        for entry in self.inputs:
            yield entry.value
        for op in self.ops:
            yield from op.results

    def fresh(self, base: str) -> str:
        """A value name that isn't taken, like `base`; it is taken from then on."""
        if self._named != self._size():
            self._names = NamePool(value.name for value in self.values())
            self._named = self._size()
        return self._names.fresh(base)

    def _size(self) -> int:
        return len(self.inputs) + len(self.ops)

    def input(self, role: str) -> Value | None:
        """The first input of this role, if any."""
        return next((entry.value for entry in self.inputs if entry.role == role), None)

    def output(self, role: str) -> Value | None:
        """The first output of this role, if any."""
        return next((value for value, own in self.outputs if own == role), None)


@dataclass(eq=False)
class Module:
    """A program: dims with inclusive ranges, a mesh, weights, functions and metadata."""

    name: str
    dims: dict[str, tuple[int, int]] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    metadata: dict[str, Attr] = field(default_factory=dict)

    @property
    def fn(self) -> Function:
        """The single function. Raises InputError when there isn't exactly one."""
        if len(self.functions) != 1:
            names = ", ".join("@" + name for name in self.functions) or "none"
            raise InputError(f"@{self.name} should have one function and has {names}: name one")
        return next(iter(self.functions.values()))

    def add_weight(self, weight: Weight) -> Weight:
        """Adds a weight; raises InputError when another one has its name."""
        if self.weights.setdefault(weight.name, weight) is not weight:
            raise InputError(f"@{self.name} has a weight @{weight.name} already: name it apart")
        return weight

    def clone(self) -> "Module":
        """A deep copy; types, expressions and attribute values are shared, being immutable."""
        weights = {key: Weight(w.name, w.type, w.expr) for key, w in self.weights.items()}
        return Module(
            name=self.name,
            dims=dict(self.dims),
            mesh=dict(self.mesh),
            weights=weights,
            functions={key: clone_function(f, weights) for key, f in self.functions.items()},
            metadata=dict(self.metadata),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Module) and _module_key(self) == _module_key(other)

    __hash__ = None  # type: ignore[assignment]  # mutable, and equal by structure


def clone_function(function: Function, weights: dict[str, Weight]) -> Function:
    """A deep copy whose weight operands are those of the same name in `weights`."""
    values: dict[Value, Value] = {}

    def copy_value(value: Value) -> Value:
        if value not in values:
            values[value] = Value(value.name, value.type)
        return values[value]

    def copy_operand(operand: Operand) -> Operand:
        if isinstance(operand, Weight):
            return weights.get(operand.name, operand)
        return copy_value(operand)

    return Function(
        name=function.name,
        inputs=[Input(copy_value(entry.value), entry.role) for entry in function.inputs],
        ops=[
            Op(
                op.name,
                [copy_operand(operand) for operand in op.args],
                {key: copy_operand(operand) for key, operand in op.kwargs.items()},
                dict(op.attrs),
                [copy_value(result) for result in op.results],
                op.loc,
            )
            for op in function.ops
        ],
        outputs=[(copy_value(value), role) for value, role in function.outputs],
        loc=function.loc,
    )


def _module_key(module: Module) -> object:
    return (
        module.name,
        list(module.dims.items()),
        list(module.mesh.items()),
        [(key, w.name, w.type, w.expr) for key, w in module.weights.items()],
        [(key, attr_key(value)) for key, value in module.metadata.items()],
        [(key, _function_key(function)) for key, function in module.functions.items()],
    )


def _function_key(function: Function) -> object:
    def operand(entry: Operand) -> tuple[str, str]:
        return ("weight" if isinstance(entry, Weight) else "value"), entry.name

    def op_key(op: Op) -> object:
        return (
            op.name,
            [operand(entry) for entry in op.args],
            [(key, operand(entry)) for key, entry in op.kwargs.items()],
            [(key, attr_key(value)) for key, value in op.attrs.items()],
            [(result.name, result.type) for result in op.results],
            op.loc,
        )

    return (
        function.name,
        [(entry.value.name, entry.value.type, entry.role) for entry in function.inputs],
        [op_key(op) for op in function.ops],
        [(value.name, role) for value, role in function.outputs],
        function.loc,
    )

"""What one op is: its operands, attributes, effects, type rule and cost. Data, no torch.

The reference of an op (its meaning, in torch) is the function of the same name under
`ropeway.compiler.ops.reference`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn, TypeAlias, cast

from ropeway.compiler.errors import VerifyError
from ropeway.compiler.ir.attrs import Attr, normalize_attr, print_attr
from ropeway.compiler.ir.dims import Dim, is_dim, product, same
from ropeway.compiler.ir.types import CacheType, DType, TensorType, Type

AttrKind: TypeAlias = Literal[
    "bool", "int", "float", "number", "dim", "str", "dtype", "ints", "dims"
]


@dataclass(frozen=True)
class AttrSpec:
    """One attribute: its kind, and a default unless it is required or may be absent.

    `required` attributes must be written; others take `default`, and stay absent if that is None.
    `choices` lists the values of a str.
    """

    kind: AttrKind
    default: Attr | None = None
    required: bool = False
    choices: tuple[str, ...] = ()

    def fault(self, value: Attr) -> str:
        """What is wrong with a value, or ""."""
        if not _KIND_TESTS[self.kind](value):
            return f"should be of kind {self.kind}, and is {print_attr(value)}"
        if self.choices and value not in self.choices:
            return f"should be one of {', '.join(self.choices)}, and is {print_attr(value)}"
        return ""

    def coerce(self, value: object) -> Attr:
        """`value` as this kind where nothing is lost (1 for a float, an enum for a str)."""
        plain = normalize_attr(value)
        if self.kind == "float" and isinstance(plain, int) and not isinstance(plain, bool):
            return float(plain)
        return plain


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: object) -> bool:
    return _is_int(value) or is_dim(value)


_KIND_TESTS: dict[str, Callable[[Attr], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": _is_int,
    "float": lambda value: isinstance(value, float),
    "number": lambda value: _is_int(value) or isinstance(value, float),
    "dim": _is_size,
    "str": lambda value: isinstance(value, str),
    "dtype": lambda value: isinstance(value, str) and value in tuple(DType),
    "ints": lambda value: isinstance(value, tuple) and all(map(_is_int, value)),
    "dims": lambda value: isinstance(value, tuple) and all(map(_is_size, value)),
}


@dataclass(frozen=True)
class Cost:
    """Work of one op: arithmetic and memory traffic (each operand read once, results written)."""

    flops: Dim
    bytes: Dim


@dataclass(frozen=True)
class OpView:
    """What a type rule sees of an op: operand types and attributes, defaults filled in."""

    name: str
    operand_names: tuple[str, ...]
    args: tuple[Type, ...]
    kwargs: Mapping[str, Type]
    attrs: Mapping[str, Attr]

    def fail(self, message: str) -> NoReturn:
        """Raises VerifyError: the op's types or attributes break its rule."""
        raise VerifyError(f"{self.name}: {message}", code="T01", rule="type rule", op=self.name)

    def has(self, name: str) -> bool:
        """Whether the optional operand is given."""
        return name in self.kwargs

    def type(self, name: str) -> Type:
        """The type of a required or a given optional operand."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[self.operand_names.index(name)]

    def tensor(self, name: str, rank: int | None = None) -> TensorType:
        """The tensor type of an operand; fails on a cache or on another rank."""
        return self.as_tensor(self.type(name), name, rank)

    def as_tensor(self, kind: Type, name: str, rank: int | None = None) -> TensorType:
        """`kind` if it is a tensor type of this rank."""
        if not isinstance(kind, TensorType):
            self.fail(f"{name} should be a tensor, and is {kind}")
        if rank is not None and kind.rank != rank:
            self.fail(f"{name} should have {rank} axes, and is {kind}")
        return kind

    def tensors(self) -> list[TensorType]:
        """The positional operands, all of them tensors."""
        return [self.as_tensor(kind, f"operand {i}") for i, kind in enumerate(self.args)]

    def cache(self, name: str) -> CacheType:
        """The cache type of an operand."""
        kind = self.type(name)
        if not isinstance(kind, CacheType):
            self.fail(f"{name} should be a cache, and is {kind}")
        return kind

    def floating(self, name: str, rank: int | None = None) -> TensorType:
        """A tensor operand that must be of a floating-point type."""
        kind = self.tensor(name, rank)
        if not kind.dtype.is_float:
            self.fail(f"{name} should be of a floating-point type, and is {kind}")
        return kind

    def indices(self, name: str, rank: int = 1) -> TensorType:
        """A tensor operand that must be i32."""
        kind = self.tensor(name, rank)
        if kind.dtype != DType.I32:
            self.fail(f"{name} should be i32, and is {kind}")
        return kind

    def check_same(self, a: Dim, b: Dim, what: str) -> None:
        """Fails unless two sizes are equal; `what` says which."""
        if not same(a, b):
            self.fail(f"{what}: {a} and {b} should be equal")

    def check_dtype(self, name: str, kind: TensorType, *allowed: DType) -> None:
        """Fails unless the operand's dtype is among `allowed`."""
        if kind.dtype not in allowed:
            names = " or ".join(dict.fromkeys(dtype.value for dtype in allowed))
            self.fail(f"{name} should be {names}, and is {kind}: insert a tensor.cast")

    def vector(self, name: str, size: Dim, *allowed: DType) -> None:
        """Checks an optional 1-d operand: its size and dtype (`allowed` or f32)."""
        if not self.has(name) and name not in self.operand_names:
            return
        kind = self.tensor(name, 1)
        self.check_same(kind.shape[0], size, f"size of {name}")
        self.check_dtype(name, kind, *allowed, DType.F32)

    def int_attr(self, name: str) -> int:
        """An attribute of kind int."""
        return cast(int, self.attrs[name])

    def float_attr(self, name: str) -> float:
        """An attribute of kind float."""
        return cast(float, self.attrs[name])

    def bool_attr(self, name: str) -> bool:
        """An attribute of kind bool."""
        return cast(bool, self.attrs[name])

    def str_attr(self, name: str) -> str:
        """An attribute of kind str."""
        return cast(str, self.attrs[name])

    def dims_attr(self, name: str) -> tuple[Dim, ...]:
        """An attribute of kind dims or ints."""
        return cast(tuple[Dim, ...], self.attrs[name])

    def dtype_attr(self, name: str, default: DType) -> DType:
        """An attribute of kind dtype, or `default` when it is absent."""
        value = self.attrs.get(name)
        return default if value is None else DType(cast(str, value))

    def axis(self, value: Dim, rank: int) -> int:
        """An axis number brought into 0..rank-1; fails when it is out of range."""
        if not isinstance(value, int) or not -rank <= value < rank:
            self.fail(f"axis {value} is out of range for {rank} axes")
        return value % rank


InferRule: TypeAlias = Callable[[OpView], Sequence[Type]]
CostRule: TypeAlias = Callable[[OpView, Sequence[Type]], Cost]
RowRule: TypeAlias = Callable[[OpView], bool]


def tensor_bytes(kind: Type) -> Dim:
    """Bytes of a tensor type; 0 for a cache (an op's own cost rule says what it touches)."""
    if not isinstance(kind, TensorType):
        return 0
    return product((*kind.shape, kind.dtype.itemsize))


def traffic(view: OpView, results: Sequence[Type]) -> Dim:
    """Bytes of all operands and results, each once."""
    total: Dim = 0
    for kind in (*view.args, *view.kwargs.values(), *results):
        total = total + tensor_bytes(kind)
    return total


def elementwise_cost(view: OpView, results: Sequence[Type]) -> Cost:
    """One operation an element of the first result."""
    first = results[0] if results else None
    flops = product(first.shape) if isinstance(first, TensorType) else 0
    return Cost(flops, traffic(view, results))


def movement_cost(view: OpView, results: Sequence[Type]) -> Cost:
    """No arithmetic, only traffic."""
    return Cost(0, traffic(view, results))


@dataclass(frozen=True)
class OpDef:
    """One entry of the registry.

    `operands` are the required positional operands, `optional` the ones given by name; a
    `variadic` op takes any number of further positional ones (its rule checks them). `reads` and
    `writes` name the cache operands with effects: an op that writes is never dead, never merged
    and never moved over another use of its cache. `rowwise` says that row i of every result
    depends on row i of the operands that have a leading token axis, and on nothing else of them;
    `rowwise_when` decides it case by case.
    """

    name: str
    operands: tuple[str, ...]
    infer: InferRule
    doc: str
    optional: tuple[str, ...] = ()
    variadic: bool = False
    attrs: Mapping[str, AttrSpec] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    cost: CostRule = elementwise_cost
    rowwise: bool = False
    rowwise_when: RowRule | None = None

    @property
    def pure(self) -> bool:
        """Whether it touches no cache."""
        return not self.reads and not self.writes

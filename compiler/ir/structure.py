"""Rules that hold for every module whatever its ops mean: names, definitions, uses, dims, roles.

Rules (code: what): S01 unique names; S02 defined before use; S03 one definition; S04 weight of the
module; S05 declared dims; S06 sizes not negative; S07 role known; S08 role's type; S09 role once;
S10 a table entry under its own name; S11 dim ranges.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from ropeway.compiler.errors import InputError, VerifyError
from ropeway.compiler.ir.dims import Dim, free_symbols, is_dim, symbol
from ropeway.compiler.ir.graph import Function, Module, Op, Value
from ropeway.compiler.ir.printer import print_op, print_operand
from ropeway.compiler.ir.types import CacheType, TensorType, Type
from ropeway.compiler.ir.weights import Weight

AROUND = 2
"""Ops shown before and after the faulty one."""


@dataclass(frozen=True)
class Role:
    """What the runtime gives or takes under a role: rank and dtypes, or a cache."""

    rank: int
    dtypes: tuple[str, ...]
    grouped: bool = False
    repeated: bool = False

    def fits(self, kind: Type) -> bool:
        """Whether a value of this type can have the role."""
        if not self.dtypes or not isinstance(kind, TensorType):
            return not self.dtypes and isinstance(kind, CacheType)
        return kind.rank == self.rank and kind.dtype.value in self.dtypes

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} with {self.rank} axes" if self.dtypes else "a cache"


_INT = ("i32",)
_FLOATS = ("f32", "bf16", "f16")
INPUT_ROLES = {
    "ids": Role(1, _INT),
    "positions": Role(1, _INT),
    "rows": Role(1, _INT),
    "slots": Role(1, _INT, grouped=True),
    "block_table": Role(2, _INT, grouped=True),
    "query_start": Role(1, _INT),
    "lengths": Role(1, _INT),
    "embeddings": Role(2, _FLOATS),
    "adapter_ids": Role(1, _INT),
    "cache": Role(0, (), repeated=True),
}
"""Roles of inputs; a grouped one is written with its cache group, as in slots.0."""
OUTPUT_ROLES = {"logits": Role(2, _FLOATS), "hidden": Role(2, _FLOATS)}
"""Roles of outputs."""

_GROUPED = re.compile(r"([a-z_]+)\.([0-9]+)")


def fault(
    code: str,
    rule: str,
    message: str,
    *,
    module: Module,
    function: Function | None = None,
    op: Op | None = None,
) -> VerifyError:
    """The error of one broken rule: one line, with op, place and ops around it attached."""
    where = f"@{module.name}"
    loc = ""
    around: tuple[str, ...] = ()
    if function is not None:
        where += f" @{function.name}"
        loc = function.loc
    if op is not None and function is not None:
        index = next((i for i, own in enumerate(function.ops) if own is op), 0)
        first = max(0, min(index - AROUND, len(function.ops) - 2 * AROUND - 1))
        shown = function.ops[first : first + 2 * AROUND + 1]
        around = tuple(("> " if own is op else "  ") + print_op(own) for own in shown)
        where += f" op {index} {', '.join(print_operand(r) for r in op.results)}".rstrip()
        loc = op.loc or loc
    if loc:
        where += f" ({loc})"
    return VerifyError(
        f"{code} {rule}: {message}; in {where}",
        code=code,
        rule=rule,
        op="" if op is None else print_op(op),
        loc=loc,
        around=around,
    )


def check_structure(module: Module) -> None:
    """Raises VerifyError for the first broken rule."""
    _check_dims(module)
    tables = (("weight", module.weights), ("function", module.functions))
    for kind, table in tables:
        for key, entry in table.items():
            if entry.name != key:
                raise fault(
                    "S10", "own name", f"{kind} {entry.name} is filed under {key}", module=module
                )
    for weight in module.weights.values():
        _Place(module).check_type(weight.type, f"weight @{weight.name}")
    for function in module.functions.values():
        _Place(module, function).check_function(function)


def _check_dims(module: Module) -> None:
    for name, (low, high) in module.dims.items():
        try:
            symbol(name)
        except InputError as error:
            raise fault("S11", "dim ranges", str(error), module=module) from error
        if not 1 <= low <= high:
            message = f"dim {name} in {low}..{high} should be a range of positive sizes"
            raise fault("S11", "dim ranges", message, module=module)


@dataclass(frozen=True)
class _Place:
    """Where a rule is being checked, so that its fault can say so."""

    module: Module
    function: Function | None = None
    op: Op | None = None

    def fail(self, code: str, rule: str, message: str) -> NoReturn:
        raise fault(code, rule, message, module=self.module, function=self.function, op=self.op)

    def check_type(self, kind: Type, what: str) -> None:
        if isinstance(kind, TensorType):
            self.check_sizes(kind.shape, f"{what}: {kind}")
            return
        for plane in kind.planes:
            self.check_sizes(plane.shape, f"{what}: {kind}")

    def check_sizes(self, sizes: Iterable[Dim], what: str) -> None:
        for size in sizes:
            if isinstance(size, int) and size < 0:
                self.fail("S06", "sizes", f"{what} has the negative size {size}")
            for name in sorted(free_symbols(size)):
                if name not in self.module.dims:
                    message = f"{what} uses the dim {name}, which the module's dims don't declare"
                    self.fail("S05", "declared dims", message)

    def check_function(self, function: Function) -> None:
        defined: dict[Value, None] = {}
        taken: set[str] = set()
        for entry in function.inputs:
            self._define(entry.value, defined, taken)
        for op in function.ops:
            _Place(self.module, function, op).check_op(op, defined, taken)
        for value, _ in function.outputs:
            if value not in defined:
                message = f"the output %{value.name} is defined nowhere"
                self.fail("S02", "defined before use", message)
        inputs = [(entry.value, entry.role) for entry in function.inputs]
        self._check_roles("input", inputs, INPUT_ROLES)
        self._check_roles("output", function.outputs, OUTPUT_ROLES)

    def check_op(self, op: Op, defined: dict[Value, None], taken: set[str]) -> None:
        for _, operand in op.operands():
            if isinstance(operand, Weight):
                if self.module.weights.get(operand.name) is not operand:
                    message = f"{op.name} reads @{operand.name}, which isn't a weight of the module"
                    self.fail("S04", "weight", message)
            elif operand not in defined:
                ops = self.function.ops if self.function else []
                later = any(operand in own.results for own in ops)
                state = "is defined only below" if later else "is defined nowhere"
                message = f"{op.name} reads %{operand.name}, which {state}"
                self.fail("S02", "defined before use", message)
        for key, attr in op.attrs.items():
            items = attr if isinstance(attr, tuple) else (attr,)
            self.check_sizes([item for item in items if is_dim(item)], f"attribute {key}")
        for result in op.results:
            self._define(result, defined, taken)

    def _define(self, value: Value, defined: dict[Value, None], taken: set[str]) -> None:
        if value in defined:
            self.fail("S03", "one definition", f"%{value.name} is defined a second time")
        if value.name in taken:
            self.fail("S01", "unique names", f"two values are called %{value.name}")
        if value.producer is not self.op:
            self.fail("S03", "one definition", f"%{value.name} names another op as its producer")
        defined[value] = None
        taken.add(value.name)
        self.check_type(value.type, f"%{value.name}")

    def _check_roles(
        self, what: str, values: Iterable[tuple[Value, str]], known: dict[str, Role]
    ) -> None:
        seen: set[str] = set()
        for value, role in values:
            if not role:
                continue
            spec = self._role(what, value, role, known)
            if role in seen and not spec.repeated:
                self.fail("S09", "role once", f"two {what}s have the role {role}")
            seen.add(role)

    def _role(self, what: str, value: Value, role: str, known: dict[str, Role]) -> Role:
        grouped = _GROUPED.fullmatch(role)
        spec = known.get(grouped.group(1) if grouped else role)
        if spec is None or spec.grouped != bool(grouped):
            names = [name + (".0" if own.grouped else "") for name, own in known.items()]
            near = difflib.get_close_matches(role, names, 1, 0.0)[0]
            message = f"%{value.name} has the unknown {what} role {role}: did you mean {near}?"
            self.fail("S07", "role known", message)
        if not spec.fits(value.type):
            message = f"%{value.name} of role {role} should be {spec}, and is {value.type}"
            self.fail("S08", "role's type", message)
        return spec

"""The table of ops, and `build`, which makes an op with its result types inferred.

Everything that gives or checks a meaning goes through here: a pass that makes ops by `build` can't
make one that the verifier refuses for its types.
"""

import difflib
from collections.abc import Mapping, Sequence

from ropeway.compiler.errors import InputError, VerifyError
from ropeway.compiler.ir.attrs import Attr
from ropeway.compiler.ir.graph import Function, Op, Operand, Value
from ropeway.compiler.ir.rewrite import Rewriter
from ropeway.compiler.ir.types import Type
from ropeway.compiler.ops.definition import Cost, OpDef, OpView
from ropeway.compiler.ops.defs import fused, math, nn, tensor

_OPS: dict[str, OpDef] = {
    entry.name: entry for entry in (*nn.OPS, *fused.OPS, *math.OPS, *tensor.OPS)
}


def register(definition: OpDef) -> OpDef:
    """Adds an op (a target's own, say). Raises InputError when the name is taken."""
    if _OPS.setdefault(definition.name, definition) is not definition:
        raise InputError(f"op {definition.name} is registered already: choose another name")
    return definition


def names() -> list[str]:
    """All registered names, sorted."""
    return sorted(_OPS)


def get(name: str) -> OpDef:
    """The definition of an op. Raises VerifyError with the nearest name."""
    if name not in _OPS:
        near = difflib.get_close_matches(name, _OPS, 1, 0.0)
        hint = f": did you mean {near[0]}?" if near else ""
        raise VerifyError(f"unknown op {name}{hint}", code="O01", rule="known op", op=name)
    return _OPS[name]


def attr(op: Op, name: str) -> Attr:
    """An attribute of `op`, or its default. Raises VerifyError when it has neither."""
    if name in op.attrs:
        return op.attrs[name]
    spec = get(op.name).attrs.get(name)
    if spec is None or spec.default is None:
        raise VerifyError(f"{op.name} has no attribute {name}", code="O03", rule="attribute")
    return spec.default


def operand(op: Op, name: str) -> Operand | None:
    """The operand of this name; None for an optional one that isn't given."""
    definition = get(op.name)
    if name in definition.operands:
        return op.args[definition.operands.index(name)]
    return op.kwargs.get(name)


def view(op: Op) -> OpView:
    """The op as type rules see it. Raises VerifyError for wrong operands or attributes."""
    definition = get(op.name)
    _check_operands(definition, op)
    return OpView(
        name=op.name,
        operand_names=definition.operands,
        args=tuple(entry.type for entry in op.args),
        kwargs={key: entry.type for key, entry in op.kwargs.items()},
        attrs=_filled(definition, op.attrs),
    )


def infer(op: Op) -> list[Type]:
    """The result types that the op's rule gives. Raises VerifyError."""
    return list(get(op.name).infer(view(op)))


def cost(op: Op) -> Cost:
    """Operations and bytes of one execution; symbolic where the shapes are."""
    return get(op.name).cost(view(op), [result.type for result in op.results])


def is_rowwise(op: Op) -> bool:
    """Whether row i of the results depends only on row i of the token-major operands."""
    definition = get(op.name)
    if definition.rowwise_when is None:
        return definition.rowwise
    return definition.rowwise_when(view(op))


def fill_defaults(op: Op) -> None:
    """Writes the defaults of absent attributes into the op."""
    op.attrs = dict(_filled(get(op.name), op.attrs))


def _check_operands(definition: OpDef, op: Op) -> None:
    wanted, given = len(definition.operands), len(op.args)
    if given < wanted or (given > wanted and not definition.variadic):
        expected = ", ".join(definition.operands) + (", ..." if definition.variadic else "")
        raise VerifyError(
            f"{op.name} takes the operands ({expected}), and got {given}",
            code="O02",
            rule="operands",
            op=op.name,
        )
    for key in op.kwargs:
        if key not in definition.optional:
            allowed = ", ".join(definition.optional) or "none"
            raise VerifyError(
                f"{op.name} has no optional operand {key}: it takes {allowed}",
                code="O02",
                rule="operands",
                op=op.name,
            )


def _filled(definition: OpDef, attrs: Mapping[str, Attr]) -> dict[str, Attr]:
    """The attributes in declared order with defaults, checked."""
    for key in attrs:
        if key not in definition.attrs:
            allowed = ", ".join(definition.attrs) or "none"
            _refuse_attr(definition, f"has no attribute {key}: it takes {allowed}")
    filled: dict[str, Attr] = {}
    for key, spec in definition.attrs.items():
        value = attrs.get(key, spec.default)
        if value is None:
            if spec.required:
                _refuse_attr(definition, f"needs the attribute {key}")
            continue
        fault = spec.fault(value)
        if fault:
            _refuse_attr(definition, f"attribute {key} {fault}")
        filled[key] = value
    return filled


def _refuse_attr(definition: OpDef, message: str) -> None:
    raise VerifyError(
        f"{definition.name} {message}", code="O03", rule="attributes", op=definition.name
    )


def build(
    where: Function | Rewriter,
    name: str,
    args: Sequence[Operand],
    kwargs: Mapping[str, Operand | None] | None = None,
    attrs: Mapping[str, object] | None = None,
    *,
    loc: str = "",
    names: Sequence[str] | None = None,
) -> Op:
    """Makes an op: defaults filled, attributes checked, result types inferred, names fresh.

    With a Function the op is appended; with a Rewriter it isn't inserted yet: the caller says
    where. `names` are wishes for the results' names (made unique); by default they are the op's
    short name. A kwarg or an attribute of None is left out. Raises VerifyError.
    """
    definition = get(name)
    given = {key: value for key, value in (attrs or {}).items() if value is not None}
    coerced = {
        key: definition.attrs[key].coerce(value) if key in definition.attrs else value
        for key, value in given.items()
    }
    op = Op(
        name,
        list(args),
        {key: value for key, value in (kwargs or {}).items() if value is not None},
        coerced,
        loc=loc,
    )
    op.attrs = _filled(definition, op.attrs)
    types = infer(op)
    base = name.rpartition(".")[2]
    wishes = list(names or [])[: len(types)]
    wishes += [base] * (len(types) - len(wishes))
    op.results = [
        Value(where.fresh(wish), kind, op) for wish, kind in zip(wishes, types, strict=True)
    ]
    if isinstance(where, Function):
        where.append(op)
    return op

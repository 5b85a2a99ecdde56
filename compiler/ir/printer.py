"""The canonical text of a module: `parse_module` reads it back equal, and prints it the same."""

from collections.abc import Iterable, Mapping

from ropeway.compiler.ir.attrs import Attr, print_attr
from ropeway.compiler.ir.graph import Function, Module, Op, Operand, Value
from ropeway.compiler.ir.lexer import print_reference, print_word, quote
from ropeway.compiler.ir.weights import Apply, Ckpt, Weight, WeightExpr

FORMAT = 1
"""Version of the text format, in every module's header."""


def print_module(module: Module) -> str:
    """The module's canonical text, ending in a newline."""
    lines = [f"module {print_reference('@', module.name)} format {FORMAT} {{"]
    if module.dims:
        ranges = ", ".join(f"{name} in {low}..{high}" for name, (low, high) in module.dims.items())
        lines.append(f"  dims {{ {ranges} }}")
    if module.mesh:
        axes = ", ".join(f"{print_word(name)} = {size}" for name, size in module.mesh.items())
        lines.append(f"  mesh {{ {axes} }}")
    if module.metadata:
        entries = ", ".join(
            f"{print_word(key)} = {print_attr(value)}" for key, value in module.metadata.items()
        )
        lines.append(f"  metadata {{ {entries} }}")
    lines += [f"  {print_weight(weight)}" for weight in module.weights.values()]
    for function in module.functions.values():
        lines += [f"  {line}".rstrip() for line in _function_lines(function)]
    lines.append("}")
    return "\n".join(lines) + "\n"


def print_function(function: Function) -> str:
    """The function's text, ending in a newline."""
    return "\n".join(_function_lines(function)) + "\n"


def print_weight(weight: Weight) -> str:
    """`weight @name : type = expression`."""
    name = print_reference("@", weight.name)
    return f"weight {name} : {weight.type} = {print_expr(weight.expr)}"


def print_expr(expr: WeightExpr) -> str:
    """A weight expression, e.g. `concat(ckpt "a", ckpt "b") {axis = 0}`."""
    if not isinstance(expr, Apply):
        return f"{'ckpt' if isinstance(expr, Ckpt) else 'const'} {quote(expr.name)}"
    args = ", ".join(print_expr(arg) for arg in expr.args)
    return f"{expr.fn}({args}){print_attrs(dict(expr.attrs))}"


def print_attrs(attrs: Mapping[str, Attr]) -> str:
    """` {key = value, ...}` in the mapping's order, or nothing."""
    if not attrs:
        return ""
    return " {" + ", ".join(f"{key} = {print_attr(value)}" for key, value in attrs.items()) + "}"


def print_operand(operand: Operand) -> str:
    """`%value` or `@weight`."""
    return print_reference("@" if isinstance(operand, Weight) else "%", operand.name)


def print_op(op: Op) -> str:
    """One line: `%y = nn.linear(%x, @w, bias=@b) {...} : bf16[T, 64] loc "m.py:3"`."""
    operands = [print_operand(operand) for operand in op.args]
    operands += [f"{key}={print_operand(operand)}" for key, operand in op.kwargs.items()]
    text = f"{op.name}({', '.join(operands)}){print_attrs(op.attrs)}"
    if op.results:
        names = ", ".join(print_operand(result) for result in op.results)
        types = ", ".join(str(result.type) for result in op.results)
        text = f"{names} = {text} : {types}"
    return text + _loc(op.loc)


def _function_lines(function: Function) -> Iterable[str]:
    inputs = ", ".join(
        f"{print_operand(entry.value)}: {_with_role(entry.value, entry.role)}"
        for entry in function.inputs
    )
    outputs = ", ".join(_with_role(value, role) for value, role in function.outputs)
    if len(function.outputs) != 1:
        outputs = f"({outputs})"
    yield f"func {print_reference('@', function.name)}({inputs}) -> {outputs} {{"
    for op in function.ops:
        yield f"  {print_op(op)}"
    returned = ", ".join(print_operand(value) for value, _ in function.outputs)
    yield f"  return {returned}".rstrip()
    yield "}" + _loc(function.loc)


def _with_role(value: Value, role: str) -> str:
    return f"{value.type} role {print_word(role)}" if role else str(value.type)


def _loc(loc: str) -> str:
    return f" loc {quote(loc)}" if loc else ""

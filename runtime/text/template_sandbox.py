"""A jinja2 environment for chat templates: sandboxed, with transformers' extras, and bounded.

A template comes with a checkpoint and is not trusted. jinja2's immutable sandbox keeps it from
Python's internals; the budget here ends a render that loops, recurses or grows without end: every
loop turn, call and filter is a step, and every operation that can make a text longer is sized
first.
"""

import contextvars
import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 300_000
MAX_TEXT = 4_000_000  # characters (or list items) of any value, and of all output together
MAX_ALLOCATED = 256_000_000  # characters of all values that a render makes
MAX_SECONDS = 5.0
MAX_SOURCE = 1_000_000
_MAX_BITS = 4096
_HUGE_WIDTH = re.compile(r"%[^a-zA-Z%]*\d{6}|\{[^{}]*\d{6}")
_FREE_NUMBERS = frozenset({"format", "format_map", "default", "d"})  # their numbers aren't sizes


class TemplateLimitError(jinja2.TemplateError):
    """A render that took too many steps, too long, or grew too large."""


class TemplateRefusalError(jinja2.TemplateError):
    """The template called raise_exception."""


class _Budget:
    def __init__(self) -> None:
        self.steps = 0
        self.text = 0
        self.allocated = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def step(self, emitted: int = 0) -> None:
        self.steps += 1
        self.text += emitted
        if self.steps > MAX_STEPS:
            raise TemplateLimitError(f"over {MAX_STEPS} steps")
        if self.text > MAX_TEXT:
            raise TemplateLimitError(f"over {MAX_TEXT} characters")
        if self.steps % 64 == 0 and time.monotonic() > self.deadline:
            raise TemplateLimitError(f"over {MAX_SECONDS:g} seconds")

    def allocate(self, size: int) -> None:
        self.allocated += size
        if self.allocated > MAX_ALLOCATED:
            raise TemplateLimitError(f"over {MAX_ALLOCATED} characters in all its values")


_budget: contextvars.ContextVar[_Budget] = contextvars.ContextVar("ropeway_template_budget")


def _step(emitted: int = 0) -> None:
    budget = _budget.get(None)  # None while jinja2 folds constants at compile time
    if budget is not None:
        budget.step(emitted)


def _check_size(size: int) -> None:
    if size > MAX_TEXT:
        raise TemplateLimitError(f"a value over {MAX_TEXT} characters")


def _size(value: object) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _made(result: Any) -> Any:
    """Counts a value that an operation made, and passes it on."""
    size = _size(result)
    _check_size(size)
    budget = _budget.get(None)
    if budget is not None:
        budget.allocate(size if isinstance(result, str) else 8 * size)
    return result


def _check_depth(value: object) -> None:
    """Sizes a value with all that it holds: lists of shared lists print exponentially long."""
    waiting, size = [value], 0
    while waiting:
        item = waiting.pop()
        size += 1
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        _check_size(size + len(waiting))


def _check_growth(name: str, subject: object, args: Iterable[object]) -> None:
    """Sizes a string operation from above before it is run."""
    arguments = list(args)
    for value in (subject, *arguments):
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            _check_depth(value)
    if name == "replace" and isinstance(subject, str) and len(arguments) > 1:
        old, new = str(arguments[0]), str(arguments[1])
        _check_size(len(subject) + subject.count(old) * len(new))
    elif name == "join":
        parts = subject if not isinstance(subject, str) else (arguments or [""])[0]
        if isinstance(parts, list | tuple | str):
            glue = _size(subject if isinstance(subject, str) else (arguments or [""])[0])
            _check_size(sum(_size(part) + glue for part in parts))
    elif name in ("format", "format_map"):
        form = str(subject)
        if _HUGE_WIDTH.search(form):
            raise TemplateLimitError("a format with a huge width")
        fields = form.count("%") + form.count("{")
        _check_size(len(form) + fields * max(map(_size, arguments), default=0))
    for number in () if name in _FREE_NUMBERS else arguments:
        if isinstance(number, int) and abs(number) > 1:
            pieces = 1 + len(re.findall(r"[\n\t]", subject)) if isinstance(subject, str) else 1
            _check_size(abs(number) * pieces)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # jinja2 passes the context (or the like) first where a filter asks for it.
    skip = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _step()
        subject = args[skip] if len(args) > skip else None
        _check_growth(name, subject, [*args[skip + 1 :], *kwargs.values()])
        return _made(function(*args, **kwargs))

    return call


class _Meter(NodeTransformer):
    """Puts a step into every loop and macro body and sizes the operator `~`."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (jinja2's naming)
        self._meter(node, node.body)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self._meter(node, node.body)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._call("concat_bounded", node.nodes).set_lineno(node.lineno)

    def _meter(self, node: nodes.Node, body: list[nodes.Node]) -> None:
        constant = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        statement = nodes.ExprStmt(self._call("take_step", [nodes.Const(constant)]))
        statement.set_environment(self._environment)
        body.insert(0, statement.set_lineno(node.lineno, override=True))

    def _call(self, name: str, arguments: list[nodes.Expr]) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
        call.set_environment(self._environment)
        return call


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares a set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for (transformers'), with a budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self._emit,
        )
        self.filters["tojson"] = _to_json
        self.filters = {n: _bounded_filter(n, f) for n, f in self.filters.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def render_bounded(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Renders within a fresh budget; raises TemplateLimitError past it."""
        token = _budget.set(_Budget())
        try:
            return template.render(**variables)
        finally:
            _budget.reset(token)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Meter(self).visit(super()._parse(source, name, filename))
        return tree

    @staticmethod
    def _emit(value: Any) -> str:
        if not isinstance(value, str):
            _check_depth(value)
        text = str(value)
        _step(len(text))
        return text

    @staticmethod
    def take_step(emitted: int) -> None:
        """Called by every loop turn and macro."""
        _step(emitted)

    @staticmethod
    def concat_bounded(*parts: Any) -> str:
        """The operator `~`."""
        _check_depth(parts)
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return str(_made("".join(texts)))

    def wrap_str_format(self, value: Any) -> Any:
        """jinja2 replaces str.format by its own, which we size."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def sized(*args: Any, **kwargs: Any) -> str:
            _check_growth("format", value.__self__, [*args, *kwargs.values()])
            return str(wrapped(*args, **kwargs))

        return sized

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Sizes the operators whose result can be huge before they run."""
        _step()
        if operator == "+":
            _check_size(_size(left) + _size(right))
        elif operator == "*":
            for sequence, number in ((left, right), (right, left)):
                if isinstance(sequence, Sized) and isinstance(number, int):
                    _check_size(len(sequence) * max(number, 0))
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 1))
        elif operator == "%" and isinstance(left, str):
            _check_growth("format", left, right if isinstance(right, tuple) else (right,))
        return _made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of the template: a step, with string methods sized first."""
        _step()
        name = getattr(obj, "__name__", "")
        subject = getattr(obj, "__self__", None)
        if isinstance(subject, str | int):
            _check_growth(name, subject, [*args, *kwargs.values()])
        return _made(super().call(context, obj, *args, **kwargs))


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateLimitError(f"a number over {_MAX_BITS} bits")


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusalError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as transformers renders it (jinja2's own escapes <, > and &)."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

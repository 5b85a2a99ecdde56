"""Reads IR text. Every fault is an IRSyntaxError with line, column and what was expected.

The text decides names and types; whether ops are known and types right is the verifier's to say.
"""

from collections.abc import Callable

from ropeway.compiler.ir.attrs import Attr, read_attr
from ropeway.compiler.ir.dims import RESERVED, Dim, read_dim
from ropeway.compiler.ir.graph import Function, Input, Module, Op, Operand, Value
from ropeway.compiler.ir.lexer import Cursor, Token
from ropeway.compiler.ir.printer import FORMAT
from ropeway.compiler.ir.types import CacheType, DType, Plane, TensorType, Type
from ropeway.compiler.ir.weights import Apply, Ckpt, Const, Weight, WeightExpr

MAX_DEPTH = 64
"""How deep weight expressions may nest in text."""

_DTYPES = {dtype.value: dtype for dtype in DType}


def parse_module(text: str, what: str = "module") -> Module:
    """Reads a whole module; `what` names the text in errors (a path, say)."""
    return _Parser(Cursor(text, what)).module()


def parse_type(text: str) -> Type:
    """Reads one type."""
    cursor = Cursor(text, "type")
    result = read_type(cursor)
    if cursor.token.kind != "end":
        cursor.fail("the end of the type")
    return result


def read_type(cursor: Cursor) -> Type:
    """Reads a tensor or cache type at the cursor."""
    if cursor.at("cache"):
        return _read_cache(cursor)
    dtype = _read_dtype(cursor)
    shape: list[Dim] = []
    cursor.expect("[")
    while not cursor.at("]"):
        shape.append(read_dim(cursor))
        if not cursor.accept(","):
            break
    cursor.expect("]")
    return TensorType(dtype, tuple(shape))


def _read_dtype(cursor: Cursor) -> DType:
    if cursor.token.kind != "name" or cursor.token.text not in _DTYPES:
        cursor.fail(f"a type: one of {', '.join(_DTYPES)} or cache")
    return _DTYPES[cursor.take().text]


def _read_cache(cursor: Cursor) -> CacheType:
    cursor.expect("cache")
    cursor.expect("<")
    cursor.expect("group")
    group = _read_int(cursor)
    cursor.expect(",")
    cursor.expect("planes")
    planes: list[Plane] = []

    def plane() -> None:
        name = cursor.expect_kind("name", "a plane's name").text
        cursor.expect(":")
        dtype = _read_dtype(cursor)
        shape: list[int] = []
        cursor.expect("[")
        _list(cursor, "]", lambda: shape.append(_read_int(cursor)))
        planes.append(Plane(name, dtype, tuple(shape)))

    cursor.expect("{")
    _list(cursor, "}", plane)
    cursor.expect(">")
    return CacheType(group, tuple(planes))


def _read_int(cursor: Cursor) -> int:
    return int(cursor.expect_kind("int", "an integer").text)


def _read_word(cursor: Cursor, expected: str) -> str:
    """A name, a reference-like number or a quoted string."""
    if cursor.token.kind == "string":
        return cursor.take().text
    return cursor.expect_kind("name", expected).text


def _list(cursor: Cursor, close: str, read: Callable[[], object]) -> None:
    """Comma-separated entries up to and including `close`."""
    while not cursor.at(close):
        read()
        if not cursor.accept(","):
            break
    cursor.expect(close)


class _Parser:
    """The state of one parse: the module so far, and the values of the function at hand."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._module = Module("")
        self._values: dict[str, Value] = {}

    def module(self) -> Module:
        cursor, module = self._cursor, self._module
        cursor.expect("module")
        module.name = cursor.expect_kind("weight", "the module's @name").text
        cursor.expect("format")
        version = cursor.token
        if _read_int(cursor) != FORMAT:
            cursor.fail(f"format {FORMAT}, the only one this version reads", version)
        cursor.expect("{")
        self._header("dims", self._dim)
        self._header("mesh", self._axis)
        self._header("metadata", self._entry)
        while cursor.at("weight"):
            self._weight()
        while cursor.at("func"):
            self._function()
        cursor.expect("}")
        if cursor.token.kind != "end":
            cursor.fail("the end of the text")
        return module

    def _header(self, word: str, read: Callable[[], None]) -> None:
        if self._cursor.accept(word):
            self._cursor.expect("{")
            _list(self._cursor, "}", read)

    def _dim(self) -> None:
        cursor = self._cursor
        token = cursor.expect_kind("name", "a dim's name")
        if "." in token.text or token.text in RESERVED or token.text in self._module.dims:
            cursor.fail("a new dim name, without dots", token)
        cursor.expect("in")
        low = _read_int(cursor)
        cursor.expect("..")
        self._module.dims[token.text] = (low, _read_int(cursor))

    def _axis(self) -> None:
        token = self._cursor.token
        name = _read_word(self._cursor, "a mesh axis")
        self._unique(name, self._module.mesh, token)
        self._cursor.expect("=")
        self._module.mesh[name] = _read_int(self._cursor)

    def _entry(self) -> None:
        token = self._cursor.token
        name = _read_word(self._cursor, "a metadata key")
        self._unique(name, self._module.metadata, token)
        self._cursor.expect("=")
        self._module.metadata[name] = read_attr(self._cursor)

    def _unique(self, name: str, taken: object, token: Token) -> None:
        if isinstance(taken, dict) and name in taken:
            self._cursor.fail("a name that isn't taken", token, f"a second {name!r}")

    def _weight(self) -> None:
        cursor = self._cursor
        cursor.expect("weight")
        token = cursor.expect_kind("weight", "the weight's @name")
        self._unique(token.text, self._module.weights, token)
        cursor.expect(":")
        at = cursor.token
        declared = read_type(cursor)
        if not isinstance(declared, TensorType):
            cursor.fail("a tensor type", at)
        cursor.expect("=")
        self._module.weights[token.text] = Weight(token.text, declared, self._expr(0))

    def _expr(self, depth: int) -> WeightExpr:
        cursor = self._cursor
        if depth > MAX_DEPTH:
            cursor.fail(f"at most {MAX_DEPTH} nested weight functions")
        name = cursor.expect_kind("name", "ckpt, const or a weight function")
        if name.text in ("ckpt", "const") and cursor.token.kind == "string":
            tensor = cursor.take().text
            return Ckpt(tensor) if name.text == "ckpt" else Const(tensor)
        args: list[WeightExpr] = []
        cursor.expect("(")
        _list(cursor, ")", lambda: args.append(self._expr(depth + 1)))
        return Apply(name.text, tuple(args), tuple(self._attrs().items()))

    def _attrs(self) -> dict[str, Attr]:
        attrs: dict[str, Attr] = {}
        if not self._cursor.accept("{"):
            return attrs

        def entry() -> None:
            token = self._cursor.expect_kind("name", "an attribute's name")
            self._unique(token.text, attrs, token)
            self._cursor.expect("=")
            attrs[token.text] = read_attr(self._cursor)

        _list(self._cursor, "}", entry)
        return attrs

    def _function(self) -> None:
        cursor = self._cursor
        cursor.expect("func")
        token = cursor.expect_kind("weight", "the function's @name")
        self._unique(token.text, self._module.functions, token)
        self._values = {}
        function = Function(token.text)
        cursor.expect("(")
        _list(cursor, ")", lambda: self._input(function))
        cursor.expect("->")
        declared = self._output_types()
        cursor.expect("{")
        while not cursor.at("return"):
            function.ops.append(self._op())
        self._return(function, declared)
        cursor.expect("}")
        function.loc = self._loc()
        self._module.functions[function.name] = function

    def _input(self, function: Function) -> None:
        token = self._cursor.expect_kind("value", "an input's %name")
        self._unique(token.text, self._values, token)
        self._cursor.expect(":")
        value = Value(token.text, read_type(self._cursor))
        self._values[value.name] = value
        function.inputs.append(Input(value, self._role()))

    def _role(self) -> str:
        return _read_word(self._cursor, "a role") if self._cursor.accept("role") else ""

    def _output_types(self) -> list[tuple[Type, str]]:
        outputs: list[tuple[Type, str]] = []

        def output() -> None:
            declared = read_type(self._cursor)
            outputs.append((declared, self._role()))

        if self._cursor.accept("("):
            _list(self._cursor, ")", output)
        else:
            output()
        return outputs

    def _return(self, function: Function, declared: list[tuple[Type, str]]) -> None:
        cursor = self._cursor
        cursor.expect("return")
        for index, (kind, role) in enumerate(declared):
            if index:
                cursor.expect(",")
            token = cursor.token
            value = self._value()
            if value.type != kind:
                cursor.fail(f"a value of the declared type {kind}", token, str(value.type))
            function.outputs.append((value, role))

    def _value(self) -> Value:
        token = self._cursor.expect_kind("value", "a %value")
        if token.text not in self._values:
            self._cursor.fail("a value defined above", token, f"%{token.text}")
        return self._values[token.text]

    def _operand(self) -> Operand:
        token = self._cursor.token
        if token.kind != "weight":
            return self._value()
        if token.text not in self._module.weights:
            self._cursor.fail("a weight of the module", token, f"@{token.text}")
        return self._module.weights[self._cursor.take().text]

    def _op(self) -> Op:
        cursor = self._cursor
        names: list[Token] = []
        while cursor.token.kind == "value":
            names.append(cursor.take())
            if not cursor.accept(","):
                break
        if names:
            cursor.expect("=")
        op = Op(cursor.expect_kind("name", "an op, a result or return").text)
        cursor.expect("(")
        _list(cursor, ")", lambda: self._op_operand(op))
        op.attrs = self._attrs()
        if names:
            cursor.expect(":")
        for index, name in enumerate(names):
            if index:
                cursor.expect(",")
            self._unique(name.text, self._values, name)
            value = Value(name.text, read_type(cursor), op)
            op.results.append(value)
            self._values[name.text] = value
        op.loc = self._loc()
        return op

    def _op_operand(self, op: Op) -> None:
        cursor = self._cursor
        token = cursor.token
        if token.kind == "name":
            cursor.take()
            self._unique(token.text, op.kwargs, token)
            cursor.expect("=")
            op.kwargs[token.text] = self._operand()
        elif op.kwargs:
            cursor.fail("a named operand, since one came before")
        else:
            op.args.append(self._operand())

    def _loc(self) -> str:
        if not self._cursor.accept("loc"):
            return ""
        return self._cursor.expect_kind("string", "the source line as a string").text

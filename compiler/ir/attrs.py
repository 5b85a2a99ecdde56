"""Attributes of ops and weight expressions: plain values that text can hold exactly."""

import math
from typing import TypeAlias

from ropeway.compiler.errors import InputError
from ropeway.compiler.ir.dims import Dim, canonical, is_dim, print_dim, read_dim
from ropeway.compiler.ir.lexer import MAX_DIGITS, Cursor, quote

Scalar: TypeAlias = bool | int | float | str | Dim
Attr: TypeAlias = Scalar | tuple[Scalar, ...]

_CONSTANTS: dict[str, bool | float] = {
    "true": True,
    "false": False,
    "inf": math.inf,
    "nan": math.nan,
}


def normalize_attr(value: object) -> Attr:
    """`value` as an attribute: lists become tuples, enums their text, dims canonical.

    Raises InputError for any other kind of value.
    """
    if isinstance(value, tuple | list):
        items = tuple(normalize_attr(item) for item in value)
        if any(isinstance(item, tuple) for item in items):
            raise InputError(f"attribute {value!r}: tuples hold plain values, not tuples")
        return items
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if len(str(abs(value))) > MAX_DIGITS:
            raise InputError(f"attribute {value}: an integer has at most {MAX_DIGITS} digits")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if is_dim(value):
        return canonical(value)
    raise InputError(f"attribute {value!r}: a {type(value).__name__} can't be an attribute")


def attr_key(value: Attr) -> object:
    """A hashable key: equal exactly when kind and value are (1 != 1.0 != true, nan == nan)."""
    if isinstance(value, tuple):
        return tuple(attr_key(item) for item in value)
    if isinstance(value, bool | int | str):
        return type(value).__name__, value
    return ("float", repr(value)) if isinstance(value, float) else ("dim", value)


def print_attr(value: Attr) -> str:
    """Text that `read_attr` reads back as the same value."""
    if isinstance(value, tuple):
        return f"[{', '.join(print_attr(item) for item in value)}]"
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    return print_dim(value)


def read_attr(cursor: Cursor) -> Attr:
    """Reads one value at the cursor; raises IRSyntaxError."""
    if not cursor.accept("["):
        return _read_scalar(cursor)
    items: list[Scalar] = []
    while not cursor.at("]"):
        items.append(_read_scalar(cursor))
        if not cursor.accept(","):
            break
    cursor.expect("]")
    return tuple(items)


def _read_scalar(cursor: Cursor) -> Scalar:
    token = cursor.token
    if token.kind == "string":
        return cursor.take().text
    if token.kind == "name" and token.text in _CONSTANTS:
        return _CONSTANTS[cursor.take().text]
    negative = cursor.at("-")
    number = cursor.ahead() if negative else token
    if number.kind == "float" or (negative and number.kind == "name" and number.text == "inf"):
        if negative:
            cursor.take()
        value = float(cursor.take().text)
        return -value if negative else value
    if token.kind in ("int", "name") or cursor.at("-") or cursor.at("("):
        return read_dim(cursor)
    cursor.fail("a value: true, a number, a string, a dim or a list")

"""Sizes: an int, or an integer polynomial over named symbols, possibly with floor divisions.

The only module that imports sympy. Every symbol comes from `symbol`, so that two symbols of one
name always carry the same assumptions: sympy treats `T` and `T` of other assumptions as different,
and a substitution then silently does nothing. Text is read by the grammar below, never by sympify
(which evaluates). Every Dim that the IR holds is canonical: expanded, and an int when constant.

    sum    := ['-'] term (('+' | '-') term)*
    term   := factor (('*' | '//') factor)*
    factor := (int | name | '(' sum ')') ['**' int]
"""

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import TypeAlias

import sympy

from ropeway.compiler.errors import InputError
from ropeway.compiler.ir.lexer import MAX_DIGITS, Cursor, Token

Dim: TypeAlias = int | sympy.Expr

RESERVED = frozenset({"true", "false", "inf", "nan"})
"""Words that attribute text already uses, so no symbol may have them."""

MAX_DEGREE = 16
MAX_DEPTH = 32
MAX_TERMS = 256

_DIGITS = re.compile(r"[0-9]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@cache
def symbol(name: str) -> sympy.Symbol:
    """The symbol of this name: a positive integer. Raises InputError for a name that isn't one."""
    if not _NAME.fullmatch(name) or name in RESERVED:
        raise InputError(f"{name!r} can't name a dim: use letters, digits and '_', like T or NB")
    return sympy.Symbol(name, integer=True, positive=True)


def canonical(value: Dim) -> Dim:
    """`value` expanded; an int if it is constant. Raises InputError for anything not a size."""
    if isinstance(value, bool):
        raise InputError(f"{value} isn't a size: give an int or a dim")
    if isinstance(value, int):
        return value
    if isinstance(value, sympy.Symbol):
        if value != symbol(value.name):
            raise InputError(f"the symbol {value.name} wasn't made by dims.symbol: use that")
        return value
    if not isinstance(value, sympy.Expr):
        if hasattr(value, "__index__"):
            return int(value.__index__())
        raise InputError(f"{value!r} isn't a size: give an int or a dim")
    expanded = sympy.expand(value)
    if expanded.is_Integer:
        return int(expanded)
    _print(expanded)  # refuses what the text can't hold
    return expanded


def is_dim(value: object) -> bool:
    """Whether `value` is symbolic (an expression that isn't a plain int)."""
    return isinstance(value, sympy.Expr)


def is_symbol(value: object) -> bool:
    """Whether `value` is a lone symbol."""
    return isinstance(value, sympy.Symbol)


def same(a: Dim, b: Dim) -> bool:
    """Whether two sizes are equal for every value of their symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(canonical(a) == canonical(b))


def product(dims: tuple[Dim, ...]) -> Dim:
    """The number of elements of a shape."""
    total: Dim = 1
    for dim in dims:
        total = total * dim
    return canonical(total)


def free_symbols(value: Dim) -> frozenset[str]:
    """The names of the symbols in `value`."""
    if isinstance(value, int):
        return frozenset()
    return frozenset(s.name for s in value.free_symbols)


def substitute(value: Dim, sizes: Mapping[str, Dim]) -> Dim:
    """`value` with the named symbols replaced, all at once; other symbols stay."""
    if isinstance(value, int):
        return value
    if isinstance(value, sympy.Symbol):  # the usual case: 1000 times faster than subs
        return canonical(sizes.get(value.name, value))
    pairs = {symbol(name): size for name, size in sizes.items()}
    return canonical(value.subs(pairs, simultaneous=True))


def solve(value: Dim, size: int) -> tuple[str, int] | None:
    """(symbol, value) that makes a dim such as `R + 1` equal to `size`.

    None unless the dim is linear in exactly one symbol and the answer isn't negative. It may be 0:
    a step in the middle of a prompt wants no rows.
    """
    names = free_symbols(value)
    if isinstance(value, int) or len(names) != 1:
        return None
    name = next(iter(names))
    origin, slope = (value.subs(symbol(name), at) for at in (0, 1))
    slope = slope - origin
    if slope == 0 or canonical(origin + slope * symbol(name)) != value:
        return None
    answer, rest = divmod(size - int(origin), int(slope))
    return None if rest or answer < 0 else (name, answer)


def floor_div(value: Dim, divisor: int) -> Dim:
    """`value // divisor`. Raises InputError unless the divisor is positive."""
    if divisor <= 0:
        raise InputError(f"a dim can't be divided by {divisor}: the divisor must be positive")
    if isinstance(value, int):
        return value // divisor
    return canonical(sympy.floor(sympy.expand(value / sympy.Integer(divisor))))


def print_dim(value: Dim) -> str:
    """Canonical text: terms by falling degree, then by name, the constant last."""
    if isinstance(value, int):
        return str(value)
    return _print(canonical(value))


@lru_cache(maxsize=4096)
def _print(value: sympy.Expr) -> str:
    terms = sorted((_term(term) for term in sympy.Add.make_args(value)), key=lambda t: t[0])
    text = ""
    for _, coefficient, factors in terms:
        size = abs(coefficient)
        body = "*".join(factors if size == 1 and factors else [str(size), *factors])
        if text:
            text += f" {'-' if coefficient < 0 else '+'} {body}"
        else:
            text = f"-{body}" if coefficient < 0 else body
    return text


def _term(term: sympy.Expr) -> tuple[tuple[int, list[str]], int, list[str]]:
    """(sort key, coefficient, printed factors) of one term of an expanded sum."""
    coefficient, rest = term.as_coeff_Mul()
    if not coefficient.is_Integer:
        raise InputError(f"{term} isn't a whole number for every size: use floor division")
    if rest == 1:
        return (0, []), int(coefficient), []
    degree = 0
    bases: list[tuple[str, int, bool]] = []
    for factor in sympy.Mul.make_args(rest):
        base, power = factor.as_base_exp()
        if not power.is_Integer or power <= 0:
            raise InputError(f"{factor} isn't an integer polynomial, so it can't be a dim")
        degree += int(power)
        bases.append((_print_base(base), int(power), base.is_Symbol))
    bases.sort()
    # Only a floor division that is a whole term needs no parentheses of its own.
    alone = len(bases) == 1 and bases[0][1] == 1 and coefficient == 1
    factors = [
        (text if plain or alone else f"({text})") + (f"**{power}" if power > 1 else "")
        for text, power, plain in bases
    ]
    if degree > MAX_DEGREE:
        raise InputError(f"{term} has a degree above {MAX_DEGREE}, so it can't be a dim")
    return (-degree, factors), int(coefficient), factors


def _print_base(base: sympy.Expr) -> str:
    if isinstance(base, sympy.Symbol):
        canonical(base)  # refuses a symbol that another factory made
        return str(base.name)
    if isinstance(base, sympy.floor):
        numerator, denominator = sympy.fraction(sympy.together(base.args[0]))
        if denominator.is_Integer:
            text = _print(sympy.expand(numerator))
            plain = numerator.is_Symbol
            return f"{text if plain else f'({text})'} // {denominator}"
    raise InputError(f"{base} isn't an integer polynomial, so it can't be a dim")


def parse_dim(text: str) -> Dim:
    """Reads one size. Raises IRSyntaxError with the column of the fault."""
    cursor = Cursor(text, "dim")
    value = read_dim(cursor)
    if cursor.token.kind != "end":
        cursor.fail("the end of the dim")
    return value


def read_dim(cursor: Cursor) -> Dim:
    """Reads one size at the cursor (see the grammar above)."""
    start = cursor.token
    value = _read_sum(cursor, 0)
    try:
        value = canonical(value)
        if any(len(digits) > MAX_DIGITS for digits in _DIGITS.findall(print_dim(value))):
            cursor.fail(f"numbers of at most {MAX_DIGITS} digits", start)
        return value
    except InputError as error:
        cursor.fail(f"a size ({error})", start)


def _read_sum(cursor: Cursor, depth: int) -> Dim:
    if depth > MAX_DEPTH:
        cursor.fail(f"at most {MAX_DEPTH} nested parentheses")
    negative = cursor.accept("-")
    total = _read_term(cursor, depth)
    if negative:
        total = -total
    while cursor.at("+") or cursor.at("-"):
        sign = 1 if cursor.take().text == "+" else -1
        total = total + sign * _read_term(cursor, depth)
    return total


def _read_term(cursor: Cursor, depth: int) -> Dim:
    value = _read_factor(cursor, depth)
    while cursor.at("*") or cursor.at("//"):
        operator = cursor.take()
        right_at = cursor.token
        right = _read_factor(cursor, depth)
        if operator.text == "//":
            if not isinstance(right, int) or right <= 0:
                cursor.fail("a positive integer divisor", right_at)
            value = floor_div(value, right)
            continue
        value = _multiply(cursor, right_at, value, right)
        if not isinstance(value, int) and len(sympy.Add.make_args(value)) > MAX_TERMS:
            cursor.fail(f"a dim of at most {MAX_TERMS} terms", right_at)
    return value


def _multiply(cursor: Cursor, at: Token, left: Dim, right: Dim) -> Dim:
    try:
        return canonical(left * right)
    except InputError as error:
        cursor.fail(f"a size ({error})", at)


def _read_factor(cursor: Cursor, depth: int) -> Dim:
    token = cursor.token
    value: Dim
    if cursor.accept("("):
        value = _read_sum(cursor, depth + 1)
        cursor.expect(")")
    elif token.kind == "int":
        value = int(cursor.take().text)
    elif token.kind == "name" and _NAME.fullmatch(token.text) and token.text not in RESERVED:
        value = symbol(cursor.take().text)
    else:
        cursor.fail("a size")
    if not cursor.accept("**"):
        return value
    power = int(cursor.expect_kind("int", "an integer power").text)
    if not 0 < power <= MAX_DEGREE or isinstance(value, int) or not _is_base(value):
        cursor.fail(f"one symbol to a power of 1 to {MAX_DEGREE}", token)
    return canonical(value**power)


def _is_base(value: sympy.Expr) -> bool:
    return isinstance(value, sympy.Symbol | sympy.floor)

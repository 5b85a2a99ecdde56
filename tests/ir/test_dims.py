"""Dims against plain integer arithmetic."""

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from ropeway.compiler.errors import InputError, IRSyntaxError
from ropeway.compiler.ir import dims

NAMES = ("T", "R", "NB")


def expressions() -> st.SearchStrategy[str]:
    """Texts that Python can evaluate too."""
    leaves = st.one_of(st.sampled_from(NAMES), st.integers(0, 99).map(str))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(
                lambda t: f"({t[0]} {t[1]} {t[2]})"
            ),
            st.tuples(inner, st.integers(1, 9)).map(lambda t: f"({t[0]} // {t[1]})"),
            inner.map(lambda text: f"(-{text})"),
        ),
        max_leaves=6,
    )


@settings(deadline=None, max_examples=80)
@given(expressions(), st.tuples(*[st.integers(1, 500)] * 3))
def test_a_dim_means_what_its_text_says(text: str, values: tuple[int, ...]) -> None:
    sizes = dict(zip(NAMES, values, strict=True))
    dim = dims.parse_dim(text)
    expected = eval(text, {"__builtins__": {}}, sizes)  # the oracle, on text made above
    assert dims.substitute(dim, sizes) == expected
    printed = dims.print_dim(dim)
    assert dims.parse_dim(printed) == dim
    assert dims.print_dim(dims.parse_dim(printed)) == printed


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("1+T", "T + 1"),
        ("T*2", "2*T"),
        ("T*T*R - 3", "R*T**2 - 3"),
        ("(T+1)*(R-2)", "R*T + R - 2*T - 2"),
        ("(T+T)//2", "T"),
        ("2*(T//2)", "2*(T // 2)"),
        ("T - T", "0"),
        ("-(R//4) + 1", "-(R // 4) + 1"),
        ("(T + 31) // 32 * 32", "32*((T + 31) // 32)"),
    ],
)
def test_canonical_text(text: str, printed: str) -> None:
    assert dims.print_dim(dims.parse_dim(text)) == printed


def test_equal_sizes_are_the_same_however_they_were_made() -> None:
    t = dims.symbol("T")
    assert dims.same(2 * (t + 1), 2 * t + 2)
    assert dims.canonical(2 * (t + 1)) == dims.canonical(2 * t + 2)
    assert not dims.same(t, t + 1)
    assert not dims.same(t, 4)
    assert dims.same(t - t + 4, 4)
    assert type(dims.canonical(t - t + 4)) is int
    assert dims.symbol("T") is t


def test_substitution_is_simultaneous_and_partial() -> None:
    t, r = dims.symbol("T"), dims.symbol("R")
    assert dims.substitute(t + 2 * r, {"T": r, "R": t}) == r + 2 * t
    assert dims.substitute(t * r, {"T": 8}) == 8 * r
    assert type(dims.substitute(t * 4, {"T": 8})) is int


@pytest.mark.parametrize("name", ["true", "inf", "", "a b", "1T", "T.x", "é"])
def test_a_symbol_needs_a_plain_name(name: str) -> None:
    with pytest.raises(InputError):
        dims.symbol(name)


@pytest.mark.parametrize(
    "value",
    [
        sympy.Symbol("T"),  # other assumptions: substituting for T would silently do nothing
        sympy.Symbol("T") + 1,
        dims.symbol("T") / 2,
        sympy.sqrt(dims.symbol("T")),
        sympy.Max(dims.symbol("T"), 3),
        1 / dims.symbol("T"),
        True,
        1.5,
        "T",
    ],
)
def test_what_is_no_size_is_refused(value: object) -> None:
    with pytest.raises(InputError):
        dims.canonical(value)


@pytest.mark.parametrize(
    "text", ["", "T +", "(T", "T)", "2 T", "T // R", "T // 0", "1.5", "T ** T"]
)
def test_bad_text_is_a_syntax_error(text: str) -> None:
    with pytest.raises(IRSyntaxError) as caught:
        dims.parse_dim(text)
    assert caught.value.column >= 1


@pytest.mark.parametrize(
    ("text", "size", "answer"),
    [
        ("R + 1", 5, ("R", 4)),
        ("2*T - 3", 5, ("T", 4)),
        ("2*T", 5, None),
        ("R + 1", 1, ("R", 0)),
        ("R + 2", 1, None),
        ("T*R", 6, None),
        ("T**2", 9, None),
        ("T // 2", 4, None),
        ("7", 7, None),
    ],
)
def test_solve(text: str, size: int, answer: tuple[str, int] | None) -> None:
    assert dims.solve(dims.parse_dim(text), size) == answer

"""One JSON value in parts, against Python's own reader of whole texts."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.answer_pieces import cut, places

from ropeway.serving.parsing.json_value import JsonValue

_decoder = json.JSONDecoder(parse_constant=lambda name: 1 / 0)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
containers = st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values)
_PARTS = '{ } [ ] " "a" : , 1 - 0 . e E+ true nul l false \\ \\u00 4e "\\n" x NaN {"a": é'
tokens = st.sampled_from([*_PARTS.split(), " ", "\n", "\x01"])


def taken(parts: list[str]) -> tuple[int, bool, bool]:
    """How many characters a value takes, and whether it is done or broken."""
    value = JsonValue()
    count = 0
    for part in parts:
        at = value.feed(part, 0)
        count += at
        if value.done or value.broken:
            break
        assert at == len(part)
    assert not (value.done and value.broken)
    return count, value.done, value.broken


@settings(deadline=None)
@given(containers, st.booleans(), st.text(max_size=4), places)
def test_a_value_ends_where_it_ends(value: Any, ascii_only: bool, behind: str, at: Any) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=1 if len(behind) % 2 else None)
    assert taken(cut(text + behind, at)) == (len(text), True, False)


@settings(deadline=None)
@given(st.lists(tokens, max_size=14), places)
def test_what_pythons_reader_takes_is_taken_and_nothing_else(parts: list[str], at: Any) -> None:
    text = "[" + "".join(parts)
    count, done, broken = taken([text])
    assert taken(cut(text, at)) == (count, done, broken)
    try:
        end: int | None = _decoder.raw_decode(text)[1]
    except (ValueError, ZeroDivisionError):
        end = None
    assert (end is not None) == done
    if done:
        assert count == end
    elif not broken:
        assert count == len(text)


@settings(deadline=None)
@given(containers)
def test_every_beginning_of_a_value_can_still_become_one(value: Any) -> None:
    text = json.dumps(value)
    for end in range(len(text)):
        assert taken([text[:end]]) == (end, False, False)


def test_depth_is_bounded() -> None:
    assert taken(["[" * 256])[2] is False
    assert taken(["[" * 300])[2] is True


def test_a_number_alone_ends_with_the_next_character() -> None:
    assert taken(["1", "2", "}"]) == (2, True, False)
    assert taken(["1.", "}"]) == (2, False, True)

"""Stop strings against a brute force that knows the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropeway.runtime.text.stop import StopScanner

alphabet = st.text("abc", min_size=1, max_size=4)


def first_match(text: str, stops: list[str], armed_from: int = 0) -> tuple[int, int, str] | None:
    """(end, start, stop): complete first, then longest; ending after `armed_from` characters."""
    found = [
        (end, end - len(stop), stop)
        for stop in stops
        for end in range(max(len(stop), armed_from + 1), len(text) + 1)
        if text[end - len(stop) : end] == stop
    ]
    return min(found) if found else None


def held_by_definition(text: str, stops: list[str]) -> int:
    """The longest end of the text that is a proper prefix of a stop string."""
    lengths = [
        k
        for stop in stops
        for k in range(1, len(stop))
        if k <= len(text) and text.endswith(stop[:k])
    ]
    return max(lengths, default=0)


@settings(max_examples=1000, deadline=None)
@given(
    chunks=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(alphabet, min_size=1, max_size=4, unique=True),
    include=st.booleans(),
)
def test_any_text_in_any_pieces(chunks: list[str], stops: list[str], include: bool) -> None:
    scanner = StopScanner(tuple(stops), include)
    text = shown = ""
    for chunk in chunks:
        text += chunk
        part, stop = scanner.feed(chunk)
        shown += part
        match = first_match(text, stops)
        if match is not None:
            end, start, expected = match
            assert stop == expected
            assert shown == text[: end if include else start]
            return
        assert stop is None
        assert shown == text[: len(text) - held_by_definition(text, stops)]
    assert shown + scanner.release() == text


@settings(max_examples=500, deadline=None)
@given(
    before=st.text("abc", max_size=6),
    after=st.text("abc", max_size=6),
    stops=st.lists(alphabet, min_size=1, max_size=3, unique=True),
)
def test_unarmed_text_hides_no_match_and_makes_none(
    before: str, after: str, stops: list[str]
) -> None:
    scanner = StopScanner(tuple(stops))
    shown = ""
    for character in before:
        part, stop = scanner.feed(character, armed=False)
        shown += part
        assert stop is None
    for count, character in enumerate(after, len(before) + 1):
        part, stop = scanner.feed(character)
        shown += part
        text = (before + after)[:count]
        match = first_match(text, stops, armed_from=len(before))
        if match is not None:
            assert stop == match[2]
            # Of a match that began in unarmed text, what was shown already stays shown.
            assert shown == text[: match[1]]
            return
        assert stop is None
    assert shown + scanner.release() == before + after


@pytest.mark.parametrize(
    ("stops", "text", "shown", "stop"),
    [
        (("abcd", "bc"), "xabcd", "xa", "bc"),  # complete first, though it starts later
        (("bc", "abc"), "xabcd", "x", "abc"),  # complete together: the longest
        (("abc", "bc"), "xabcd", "x", "abc"),
        (("aab",), "aaab", "a", "aab"),  # overlaps itself
        (("\n\n", "User:"), "Hi\n\nUser: x", "Hi", "\n\n"),
        (("🙂!",), "ok 🙂!", "ok ", "🙂!"),
    ],
)
def test_policy(stops: tuple[str, ...], text: str, shown: str, stop: str) -> None:
    assert StopScanner(stops).feed(text) == (shown, stop)
    pieces = StopScanner(stops)
    parts = []
    for character in text:
        part, found = pieces.feed(character)
        parts.append(part)
        if found:
            break
    assert ("".join(parts), found) == (shown, stop)


def test_holds_a_proper_prefix_and_no_more() -> None:
    scanner = StopScanner(("</answer>",))
    assert scanner.feed("x < y </ans") == ("x < y ", None)
    assert scanner.feed("!") == ("</ans!", None)
    assert scanner.feed("plain text") == ("plain text", None)
    assert scanner.feed("<") == ("", None)
    assert scanner.release() == "<"


def test_a_long_near_miss_costs_one_pass() -> None:
    """'aaaa...' against 'aaa...b': each character is stepped over a bounded number of times."""
    scanner = StopScanner(("a" * 4000 + "b",))
    shown = sum(len(scanner.feed("a" * 50)[0]) for _ in range(2000))
    assert shown == 100_000 - 4000

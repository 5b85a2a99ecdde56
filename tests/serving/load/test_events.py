"""Events out of a byte stream, whatever its cuts, line ends and fields."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropeway.serving.load.events import EventSplitter

LINE_ENDS = (b"\n", b"\r\n", b"\r")


def collect(pieces: list[bytes]) -> list[bytes]:
    splitter = EventSplitter()
    return [event for piece in pieces for event in splitter.feed(piece)]


@pytest.mark.parametrize("end", LINE_ENDS)
def test_every_cut_of_a_stream_gives_the_same_events(end: bytes) -> None:
    lines = [
        b": keep-alive",
        b"data: one",
        b"",
        b"event: delta",
        b"data:two",
        b"data: lines",
        b"id: 7",
        b"",
        b"",
        b"data",
        b"",
        b"data: \xc3\xa9",
        b"",
        b"data: dropped, for nothing ends it",
    ]
    whole = end.join(lines)
    expected = [b"one", b"two\nlines", b"", b"\xc3\xa9"]
    assert collect([whole]) == expected
    assert collect([whole[at : at + 1] for at in range(len(whole))]) == expected
    for cut in range(len(whole) + 1):
        assert collect([whole[:cut], b"", whole[cut:]]) == expected, cut


@given(
    st.lists(st.binary(max_size=12).filter(lambda data: not set(data) & set(b"\r\n"))),
    st.lists(st.integers(1, 7), min_size=1),
    st.sampled_from(LINE_ENDS),
)
def test_what_is_sent_arrives(events: list[bytes], sizes: list[int], end: bytes) -> None:
    whole = b"".join(b"data: " + data + end + end for data in events)
    pieces = []
    turn = 0
    while whole:
        size = sizes[turn % len(sizes)]
        pieces.append(whole[:size])
        whole = whole[size:]
        turn += 1
    assert collect(pieces) == events


def test_an_event_is_told_with_the_byte_that_ends_it() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\r\n\r") == [b"a"]
    assert splitter.feed(b"\n") == []
    assert splitter.feed(b"data: b\n\n") == [b"b"]

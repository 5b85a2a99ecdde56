"""A parser's pieces, put together so that they can be compared however the text was cut."""

from collections.abc import Callable, Iterable, Sequence

from hypothesis import strategies as st

from ropeway.serving.parsing.pieces import (
    CallArguments,
    CallStart,
    Content,
    OutputParser,
    Piece,
    Reasoning,
)

Joined = list[tuple[str, ...]]


def joined(pieces: Iterable[Piece]) -> Joined:
    """("content", text), ("reasoning", text) and ("call", name, arguments), in order."""
    made: Joined = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls = sum(one[0] == "call" for one in made)
            assert piece.index == calls
            assert piece.call_id
            made.append(("call", piece.name, ""))
        elif isinstance(piece, CallArguments):
            kind, name, arguments = made[-1]
            assert kind == "call"
            assert piece.index == sum(one[0] == "call" for one in made) - 1
            made[-1] = (kind, name, arguments + piece.text)
        else:
            assert isinstance(piece, Content | Reasoning)
            assert piece.text
            kind = "content" if isinstance(piece, Content) else "reasoning"
            if made and made[-1][0] == kind:
                made[-1] = (kind, made[-1][1] + piece.text)
            else:
                made.append((kind, piece.text))
    return made


def read(make: Callable[[], OutputParser], parts: Sequence[str]) -> Joined:
    """What a parser makes of a text that comes in `parts`."""
    parser = make()
    pieces = [piece for part in parts for piece in parser.push(part)]
    pieces += parser.finish()
    made = joined(pieces)
    assert parser.called == any(one[0] == "call" for one in made)
    return made


def cut(text: str, places: Iterable[int]) -> list[str]:
    """`text` in parts that begin at `places`, taken modulo its length."""
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


places = st.lists(st.integers(0, 10_000), max_size=8)

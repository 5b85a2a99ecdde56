"""Which decoders are read token by token, and that the library decodes the same."""

import pytest
from tokenizers import decoders

from ropeway.runtime.text.detokenizer import ByteDetokenizer, decode_all
from ropeway.runtime.text.pieces import PieceRules, rules_of

MARK = "\u2581"
REPLACE = {"type": "Replace", "pattern": {"String": MARK}, "content": " "}
FALLBACK = {"type": "ByteFallback"}
FUSE = {"type": "Fuse"}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def sequence(*steps: dict) -> dict:
    return {"type": "Sequence", "decoders": list(steps)}


@pytest.mark.parametrize(
    ("decoder", "rules"),
    [
        ({"type": "ByteLevel"}, PieceRules(byte_level=True)),
        (sequence({"type": "ByteLevel"}), PieceRules(byte_level=True)),
        (
            sequence(REPLACE, FALLBACK, FUSE, STRIP),
            PieceRules(replacements=((MARK, " "),), fallback=True, strip=1),
        ),
        (  # Gemma: the leading space stays
            sequence(REPLACE, FALLBACK, FUSE),
            PieceRules(replacements=((MARK, " "),), fallback=True),
        ),
        (
            {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "never"},
            PieceRules(replacements=((MARK, " "),)),
        ),
        (
            {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "always"},
            PieceRules(replacements=((MARK, " "),), strip=1),
        ),
        (None, None),
        ({"type": "WordPiece"}, None),
        (sequence(FALLBACK, REPLACE, FUSE), None),  # another order means another text
        (sequence(REPLACE, FALLBACK, STRIP), None),  # strips every token, not the text
        (sequence(REPLACE, FALLBACK, FUSE, STRIP | {"stop": 1}), None),
        (sequence({"type": "Replace", "pattern": {"Regex": "x"}, "content": ""}), None),
    ],
)
def test_rules(decoder: dict | None, rules: PieceRules | None) -> None:
    assert rules_of(decoder) == rules


@pytest.mark.parametrize(
    ("decoder", "library"),
    [
        ({"type": "ByteLevel"}, decoders.ByteLevel()),
        (
            sequence(REPLACE, FALLBACK, FUSE, STRIP),
            decoders.Sequence(
                [
                    decoders.Replace(MARK, " "),
                    decoders.ByteFallback(),
                    decoders.Fuse(),
                    decoders.Strip(" ", 1, 0),
                ]
            ),
        ),
        ({"type": "Metaspace", "replacement": MARK}, decoders.Metaspace()),
    ],
)
@pytest.mark.parametrize(
    "tokens",
    [
        ["\u2581the", "\u2581cat", "s"],
        ["\u2581", "x", "\u2581\u2581", "y"],
        ["<0xE4>", "<0xB8>", "<0xAD>", "z"],
        ["ðŁĺ", "Ģ", "Ġa", "Ċ"],
        ["<0x0A>", "<0xZZ>", "<0x0a>"],
        ["中", "Ġ中", " plain space"],
    ],
)
def test_pieces_are_the_librarys(decoder: dict, library: decoders.Decoder, tokens: list) -> None:
    rules = rules_of(decoder)
    assert rules is not None
    detokenizer = ByteDetokenizer(
        lambda i: rules.piece(tokens[i]), strip=rules.strip, each=rules.fallback
    )
    assert decode_all(detokenizer, range(len(tokens))) == library.decode(tokens)

"""What each token stands for in bytes, read off a tokenizer's decoder.

Byte-level BPE and sentencepiece-like tokenizers (with byte fallback) decode token by token: the
text is the UTF-8 reading of the tokens' bytes, one after the other, less a leading space. That
makes incremental decoding exact and O(1) per token. Any other decoder gives None here, and the
detokenizer compares decoded windows instead.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-in character of each byte: itself where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    return alphabet | {chr(0x100 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


class PieceRules(msgspec.Struct, frozen=True):
    """How a token's text becomes bytes.

    `strip` spaces are dropped from the start of the whole text. `fallback`: tokens like <0xE4> are
    bytes, and an undecodable byte shows as one U+FFFD each (in byte-level BPE: one for each
    truncated character).
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    fallback: bool = False
    strip: int = 0

    def piece(self, token: str) -> bytes:
        """The bytes of one token."""
        if self.byte_level:
            codes = [_ALPHABET.get(c) for c in token]
            known = [c for c in codes if c is not None]
            return bytes(known) if len(known) == len(codes) else token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token) if self.fallback else None
        return bytes([int(match[1], 16)]) if match else token.encode()


def rules_of(decoder: Mapping[str, Any] | None) -> PieceRules | None:
    """The rules of a tokenizer.json `decoder`, None for one that doesn't decode token by token."""
    steps = _flatten(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRules(byte_level=True)
    if kinds == ["Metaspace"]:
        strip = 0 if steps[0].get("prepend_scheme") == "never" else 1
        mark = steps[0].get("replacement", "\u2581")
        return PieceRules(replacements=((mark, " "),), strip=strip)
    return _sentencepiece(steps) if steps else None


def _sentencepiece(steps: Sequence[Mapping[str, Any]]) -> PieceRules | None:
    """Replace..., ByteFallback, Fuse, Strip: each may be missing, the order is fixed."""
    replacements: list[tuple[str, str]] = []
    stage, fallback, fused, strip = 0, False, False, 0
    order = {"Replace": 0, "ByteFallback": 1, "Fuse": 2, "Strip": 3}
    for step in steps:
        kind = step.get("type")
        if kind not in order or order[kind] < stage:
            return None
        stage = order[kind]
        if kind == "Replace":
            pattern = step.get("pattern", {})
            if "String" not in pattern:
                return None
            replacements.append((pattern["String"], step.get("content", "")))
        elif kind == "ByteFallback":
            fallback = True
        elif kind == "Fuse":
            fused = True
        else:
            if not fused or step.get("content") != " " or step.get("stop", 0):
                return None
            strip = int(step.get("start", 0))
    return PieceRules(replacements=tuple(replacements), fallback=fallback, strip=strip)


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", []) for step in _flatten(part)]
    return [decoder]

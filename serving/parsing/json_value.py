"""Recognizes one JSON value that comes in parts: how far it reaches, and where it stops being one.

Strict JSON (RFC 8259): control characters in strings, comments and trailing commas end it.
"""

import re

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # of a string
_ESCAPES = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE][+-]?[0-9]*)?)?|[eE][+-]?[0-9]*)?)?"
)
_MAX_DEPTH = 256  # of arrays and objects


class JsonValue:
    """One value. Feed it until it is `done` or `broken`; where a part is cut makes no difference.

    Space before the value is part of it, space behind it isn't. A number is done only when another
    character follows.
    """

    __slots__ = ("_key", "_mode", "_open", "_word", "broken", "done")

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._open: list[str] = []  # closing brackets to come
        self._mode = self._value
        self._key = False  # the string being read is a key
        self._word = ""  # of a number, a literal or \u that has begun

    def feed(self, text: str, at: int) -> int:
        """Reads on from text[at]; the index of the first character that isn't the value's."""
        end = len(text)
        while at < end and not (self.done or self.broken):
            at = self._mode(text, at)
        return at

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char == '"':
            self._mode = self._string
        elif char in "{[":
            self._open.append("}" if char == "{" else "]")
            self._mode = self._first_key if char == "{" else self._first_item
            self.broken = len(self._open) > _MAX_DEPTH
        elif char in "-0123456789":
            self._word, self._mode = char, self._number
        elif char in _LITERALS:
            self._word, self._mode = char, self._literal
        elif char not in _SPACE:
            return self._stop(at)
        return at + 1

    def _first_item(self, text: str, at: int) -> int:
        if text[at] == "]":
            return self._close(at)
        if text[at] in _SPACE:
            return at + 1
        self._mode = self._value
        return at

    def _first_key(self, text: str, at: int) -> int:
        return self._close(at) if text[at] == "}" else self._next_key(text, at)

    def _next_key(self, text: str, at: int) -> int:
        if text[at] == '"':
            self._key, self._mode = True, self._string
        elif text[at] not in _SPACE:
            return self._stop(at)
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._mode = self._value
        elif text[at] not in _SPACE:
            return self._stop(at)
        return at + 1

    def _comma(self, text: str, at: int) -> int:
        char = text[at]
        if char == ",":
            self._mode = self._next_key if self._open[-1] == "}" else self._value
        elif char == self._open[-1]:
            return self._close(at)
        elif char not in _SPACE:
            return self._stop(at)
        return at + 1

    def _string(self, text: str, at: int) -> int:
        match = _PLAIN.match(text, at)
        at = match.end() if match else at
        if at == len(text):
            return at
        if text[at] == "\\":
            self._mode = self._escape
        elif text[at] != '"':
            return self._stop(at)
        elif self._key:
            self._key, self._mode = False, self._colon
        else:
            self._end_value()
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._word, self._mode = "", self._code
        elif text[at] in _ESCAPES:
            self._mode = self._string
        else:
            return self._stop(at)
        return at + 1

    def _code(self, text: str, at: int) -> int:
        if text[at] not in _HEX:
            return self._stop(at)
        self._word += text[at]
        if len(self._word) == 4:
            self._mode = self._string
        return at + 1

    def _number(self, text: str, at: int) -> int:
        word = self._word + text[at]
        if _NUMBER_BEGUN.fullmatch(word):
            self._word = word
            return at + 1
        if not _NUMBER.fullmatch(self._word):
            return self._stop(at)
        self._end_value()
        return at

    def _literal(self, text: str, at: int) -> int:
        whole = _LITERALS[self._word[0]]
        if text[at] != whole[len(self._word)]:
            return self._stop(at)
        self._word += text[at]
        if self._word == whole:
            self._end_value()
        return at + 1

    def _close(self, at: int) -> int:
        self._open.pop()
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._mode = self._comma
        self.done = not self._open

    def _stop(self, at: int) -> int:
        self.broken = True
        return at

"""Tokens of IR text, dims and pass specs, with the line and column of each.

Nothing here evaluates anything: text becomes tokens, and every fault an IRSyntaxError that says
line, column and what was expected.
"""

import re
from dataclasses import dataclass
from typing import NoReturn

from ropeway.compiler.errors import IRSyntaxError

MAX_DIGITS = 20
"""Longest integer that text may hold: every 64-bit size fits, and no parse can be made slow."""

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\"}
_ESCAPED = {value: f"\\{key}" for key, value in _ESCAPES.items()}
_REFERENCE = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*"
_STRING = r'"(?:[^"\\\n]|\\[^\n])*"'
_TOKEN = re.compile(
    rf"""(?P<space>[ \t\r\n]+|\#[^\n]*)
    |(?P<value>%(?:{_REFERENCE}|{_STRING}))
    |(?P<weight>@(?:{_REFERENCE}|{_STRING}))
    |(?P<string>{_STRING})
    |(?P<float>[0-9]+\.[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)
    |(?P<int>[0-9]+)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)
    |(?P<punct>->|\.\.|//|\*\*|[-+*{{}}()\[\]<>,:=])""",
    re.VERBOSE,
)
_PLAIN_REFERENCE = re.compile(_REFERENCE)
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")
_ESCAPE = re.compile(r"\\(u\{([0-9a-f]{1,6})\}|.)")


@dataclass(frozen=True)
class Token:
    """One token: `kind` is value, weight, string, float, int, name, punct or end.

    `text` is what stood in the source, save for strings and references, where it is the name or
    the text meant (quotes and escapes resolved, the sigil dropped).
    """

    kind: str
    text: str
    offset: int


def quote(text: str) -> str:
    """`text` as a string literal; everything that isn't printable is escaped."""
    parts = [_ESCAPED.get(c) or (c if c.isprintable() else f"\\u{{{ord(c):x}}}") for c in text]
    return '"' + "".join(parts) + '"'


def print_reference(sigil: str, name: str) -> str:
    """`%name` or `@name`; names of unusual characters are quoted."""
    return sigil + (name if _PLAIN_REFERENCE.fullmatch(name) else quote(name))


def print_word(text: str) -> str:
    """A role or a metadata key: plain when it reads as one name, else quoted."""
    return text if _PLAIN_NAME.fullmatch(text) else quote(text)


class Cursor:
    """A position in tokenized text, and the only place that makes syntax errors.

    `what` names the text in errors (a file name, "dim", "pass spec").
    """

    def __init__(self, text: str, what: str = "text") -> None:
        self._text = text
        self._what = what
        self._tokens = self._tokenize()
        self._position = 0

    def _tokenize(self) -> list[Token]:
        tokens: list[Token] = []
        offset = 0
        while offset < len(self._text):
            match = _TOKEN.match(self._text, offset)
            if match is None:
                self._raise(offset, "a token", f"character {self._text[offset]!r}")
            kind = str(match.lastgroup)
            if kind != "space":
                tokens.append(Token(kind, self._meaning(kind, match.group(), offset), offset))
            offset = match.end()
        tokens.append(Token("end", "", len(self._text)))
        return tokens

    def _meaning(self, kind: str, text: str, offset: int) -> str:
        if kind == "int" and len(text) > MAX_DIGITS:
            self._raise(offset, f"an integer of at most {MAX_DIGITS} digits", f"{len(text)} digits")
        if kind in ("value", "weight"):
            text = text[1:]
        if not text.startswith('"'):
            return text

        def resolve(match: re.Match[str]) -> str:
            if match.group(2):
                code = int(match.group(2), 16)
                if code <= 0x10FFFF:
                    return chr(code)
            elif match.group(1) in _ESCAPES:
                return _ESCAPES[match.group(1)]
            self._raise(offset, 'an escape of \\n \\t \\r \\" \\\\ \\u{hex}', repr(match.group()))

        return _ESCAPE.sub(resolve, text[1:-1])

    @property
    def token(self) -> Token:
        """The next token, not consumed; an `end` token after the last."""
        return self._tokens[self._position]

    def ahead(self, count: int = 1) -> Token:
        """The token `count` after the next one."""
        return self._tokens[min(self._position + count, len(self._tokens) - 1)]

    def take(self) -> Token:
        """Consumes the next token (the end token stays)."""
        token = self.token
        if token.kind != "end":
            self._position += 1
        return token

    def at(self, text: str) -> bool:
        """Whether the next token is this punctuation or name."""
        return self.token.kind in ("punct", "name") and self.token.text == text

    def accept(self, text: str) -> bool:
        """Consumes the next token if it is this punctuation or name."""
        found = self.at(text)
        if found:
            self._position += 1
        return found

    def expect(self, text: str) -> Token:
        """Consumes this punctuation or name, or raises IRSyntaxError."""
        if not self.at(text):
            self.fail(f"'{text}'")
        return self.take()

    def expect_kind(self, kind: str, expected: str) -> Token:
        """Consumes a token of this kind, or raises IRSyntaxError naming `expected`."""
        if self.token.kind != kind:
            self.fail(expected)
        return self.take()

    def fail(self, expected: str, token: Token | None = None, found: str = "") -> NoReturn:
        """Raises IRSyntaxError at `token` (the next one by default)."""
        token = token or self.token
        if not found:
            found = "the end of the text" if token.kind == "end" else repr(token.text)
        self._raise(token.offset, expected, found)

    def _raise(self, offset: int, expected: str, found: str) -> NoReturn:
        line = self._text.count("\n", 0, offset) + 1
        column = offset - (self._text.rfind("\n", 0, offset) + 1) + 1
        raise IRSyntaxError(
            f"{self._what}:{line}:{column}: expected {expected}, found {found}",
            line=line,
            column=column,
            expected=expected,
        )

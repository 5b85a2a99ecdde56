"""Finding a marker in text that comes in parts. A marker takes the space around it with it."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ropeway.runtime.text.tokenizer import Tokenizer


class Marker:
    """`text` and, as a part of it, the space before."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._whole = re.compile(rf"\s*{re.escape(text)}")
        self._begun = re.compile(rf"\s*(?:{beginnings(text)})?")

    def find(self, text: str) -> tuple[int, int] | None:
        """Begin and end of the first one in `text`."""
        at = text.find(self.text)
        return (len(text[:at].rstrip()), at + len(self.text)) if at >= 0 else None

    def length_at_start(self, text: str) -> int:
        """The length of the marker that `text` begins with; 0 for none."""
        found = self._whole.match(text)
        return found.end() if found else 0

    def may_begin(self, text: str) -> bool:
        """Whether all of `text` is the beginning of a marker that isn't whole yet."""
        return self._begun.fullmatch(text) is not None

    def certain(self, text: str) -> int:
        """How much of `text`, which holds no whole marker, isn't the beginning of one."""
        cut = len(text)
        begin = text.find(self.text[0], max(cut - len(self.text) + 1, 0))
        while begin >= 0:
            if self.text.startswith(text[begin:]):
                cut = begin
                break
            begin = text.find(self.text[0], begin + 1)
        return len(text[:cut].rstrip())


def beginnings(text: str) -> str:
    """An expression for the beginnings of `text` that are neither empty nor all of it."""
    pattern = ""
    for char in reversed(text[:-1]):
        pattern = f"{re.escape(char)}(?:{pattern})?" if pattern else re.escape(char)
    return pattern


def token_of(tokenizer: "Tokenizer", text: str) -> int | None:
    """The id of the token that `text` is by itself; None if it takes several."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None

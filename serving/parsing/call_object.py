"""Reads {"name": ..., "arguments": {...}} while a model writes it."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Literal

from ropeway.serving.parsing.json_value import JsonValue

_SPACE = " \t\n\r"
_ARGUMENTS = frozenset({"arguments", "parameters"})
_BARE_KEYS = _ARGUMENTS | {"name", "type"}
_NAME = re.compile(r"[\w.:/-]{1,256}")


class CallObject:
    """One call. Feed it until `state` isn't "open"; where a part is cut makes no difference.

    It has `started` once its name and the beginning of its arguments, an object, are known;
    `take_arguments` then gives the arguments' text as it comes. `held` is what was read and isn't
    told by that: before the start everything, and then what follows the arguments.

    With `names` (for a call that no marker announced) the name must be one of them, there must be
    arguments, and no keys but those of a call.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.state: Literal["open", "done", "broken"] = "open"
        self.started = False
        self.name = ""
        self.held = ""
        self._names = names
        self._step: Callable[[str, int], int] = self._brace
        self._keys: set[str] = set()
        self._value = JsonValue()
        self._word = ""  # the text of the key or value that is being read
        self._key = ""
        self._arguments: str | None = None  # those not taken yet

    def feed(self, text: str, at: int) -> int:
        """Reads on from text[at]; the index of the first character that isn't the call's."""
        end = len(text)
        while at < end and self.state == "open":
            begin, arguing = at, self._step == self._argument
            at = self._step(text, at)
            if arguing:
                self._arguments = (self._arguments or "") + text[begin:at]
            if not (arguing and self.started):
                self.held += text[begin:at]
            if not self.started and self.name and self._arguments is not None:
                self.started, self.held = True, ""
        return at

    def take_arguments(self) -> str:
        """What came of the arguments since the last time; "" before the call has started."""
        if not self.started or not self._arguments:
            return ""
        taken, self._arguments = self._arguments, ""
        return taken

    def _brace(self, text: str, at: int) -> int:
        return self._expect(text, at, {"{": self._first_key})

    def _first_key(self, text: str, at: int) -> int:
        return self._end(at) if text[at] == "}" else self._next_key(text, at)

    def _next_key(self, text: str, at: int) -> int:
        if text[at] != '"':
            return self._expect(text, at, {})
        self._value, self._word, self._step = JsonValue(), "", self._key_text
        return at

    def _key_text(self, text: str, at: int) -> int:
        at = self._read(text, at, self._colon)
        if self._step == self._colon:
            self._key = json.loads(self._word)
            again = _ARGUMENTS if self._key in _ARGUMENTS else {self._key}
            if self._keys & again or (self._names is not None and self._key not in _BARE_KEYS):
                self.state = "broken"
            self._keys.add(self._key)
        return at

    def _colon(self, text: str, at: int) -> int:
        return self._expect(text, at, {":": self._begin_value})

    def _begin_value(self, text: str, at: int) -> int:
        if text[at] in _SPACE:
            return at + 1
        self._value, self._word = JsonValue(), ""
        wanted = text[at]
        self._step = self._other
        if self._key == "name":
            wanted, self._step = '"', self._name_text
        elif self._key in _ARGUMENTS:
            wanted, self._step, self._arguments = "{", self._argument, ""
        return at if text[at] == wanted else self._stop(at)

    def _name_text(self, text: str, at: int) -> int:
        at = self._read(text, at, self._comma)
        if self._step == self._comma:
            name = json.loads(self._word)
            known = self._names is None or name in self._names
            if not known or not _NAME.fullmatch(name):
                return self._stop(at)
            self.name = name
        return at

    def _argument(self, text: str, at: int) -> int:
        return self._read(text, at, self._comma)

    def _other(self, text: str, at: int) -> int:
        return self._read(text, at, self._comma)

    def _comma(self, text: str, at: int) -> int:
        return self._end(at) if text[at] == "}" else self._expect(text, at, {",": self._next_key})

    def _end(self, at: int) -> int:
        """A closing brace: without arguments the call has none, which is {}."""
        if not self.name or (self._arguments is None and self._names is not None):
            return self._stop(at)
        if self._arguments is None:
            self._arguments = "{}"
        self.state = "done"
        return at + 1

    def _read(self, text: str, at: int, then: Callable[[str, int], int]) -> int:
        end = self._value.feed(text, at)
        if self._step != self._argument:
            self._word += text[at:end]
        if self._value.done:
            self._step = then
        return self._stop(end) if self._value.broken else end

    def _expect(self, text: str, at: int, steps: Mapping[str, Callable[[str, int], int]]) -> int:
        """One of the characters, after any space."""
        step = steps.get(text[at])
        if step is not None:
            self._step = step
        elif text[at] not in _SPACE:
            return self._stop(at)
        return at + 1

    def _stop(self, at: int) -> int:
        self.state = "broken"
        return at

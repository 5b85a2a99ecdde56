"""Tool calls as Mistral models write them, older and newer:

[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
[TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}, where [ARGS] may be missing
"""

import re
from collections.abc import Callable

from ropeway.serving.parsing.json_value import JsonValue
from ropeway.serving.parsing.markers import Marker, beginnings
from ropeway.serving.parsing.stepped import SteppedParser

CALLS = Marker("[TOOL_CALLS]")
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
_NAME = r"\s*(?P<name>[\w.-]{1,256})"
_ID = rf"{re.escape(CALL_ID)}(?P<id>\w{{1,64}})"
_BEHIND = rf"(?:{re.escape(ARGUMENTS)})?\s*"
_HEAD = re.compile(rf"{_NAME}(?:{_ID})?{_BEHIND}(?=\{{)")
_HEAD_BEGUN = re.compile(
    rf"{_NAME}(?:{beginnings(CALL_ID)}|{re.escape(CALL_ID)}"
    rf"|(?:{_ID})?(?:{beginnings(ARGUMENTS)}|{_BEHIND}))"
)


class MistralParser(SteppedParser):
    """An id that the model gives to a call is kept."""

    def __init__(self, new_id: Callable[[], str], *, single: bool) -> None:
        super().__init__(CALLS, new_id, single=single)
        self._arguments = JsonValue()

    def _behind_marker(self) -> bool:
        rest = self._text.lstrip()
        if rest.startswith("["):
            self._markup += self._take(len(self._text) - len(rest) + 1)
            return self._go(self._item)
        return bool(rest) and self._go(self._head)

    def _item(self) -> bool:
        rest = self._text.lstrip()
        if rest.startswith("{"):
            return self._begin_object()
        return bool(rest) and self._give_up(started=False)

    def _after_object(self) -> bool:
        rest = self._text.lstrip()
        if not rest:
            self._text = "" if self._last else self._text
            return False
        if rest[0] not in ",]":
            return self._go(self._free)
        taken = self._take(len(self._text) - len(rest) + 1)
        if rest[0] == "]":
            return self._go(self._skip_space)
        self._markup = taken
        return self._go(self._item)

    def _head(self) -> bool:
        head = _HEAD.match(self._text)
        if head is None:
            begun = _HEAD_BEGUN.fullmatch(self._text) is not None
            return not begun and self._give_up(started=False)
        self._take(head.end())
        self._announce(head["name"], head["id"])
        self._arguments = JsonValue()
        return self._go(self._read_arguments)

    def _read_arguments(self) -> bool:
        self._argue(self._take(self._arguments.feed(self._text, 0)))
        if self._arguments.broken:
            return self._give_up(started=True)
        return self._arguments.done and self._end_call(self._skip_space)

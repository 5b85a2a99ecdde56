"""Tool calls as Hermes and Qwen models write them: <tool_call>{"name", "arguments"}</tool_call>."""

from collections.abc import Callable

from ropeway.serving.parsing.markers import Marker
from ropeway.serving.parsing.stepped import SteppedParser

OPEN = Marker("<tool_call>")
CLOSE = Marker("</tool_call>")


class HermesParser(SteppedParser):
    """Any number of calls, between which there may be text. A missing end of a call is forgiven."""

    def __init__(self, new_id: Callable[[], str], *, single: bool) -> None:
        super().__init__(OPEN, new_id, single=single)

    def _behind_marker(self) -> bool:
        return self._begin_object()

    def _after_object(self) -> bool:
        length = CLOSE.length_at_start(self._text)
        if length:
            self._take(length)
            return self._go(self._skip_space)
        if CLOSE.may_begin(self._text):
            if self._last:
                self._text = ""
            return False
        return self._go(self._free)

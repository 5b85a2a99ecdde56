"""Tool calls as Llama 3 models write them: {"name", "parameters"}, several with ";" between them.

Contract: <|python_tag|> begins calls anywhere. Without it an object is a call only where the answer
begins or behind a call's ";", and only if it names one of the request's tools: else a model that is
asked for JSON would seem to call.
"""

from collections.abc import Callable, Collection

from ropeway.serving.parsing.markers import Marker
from ropeway.serving.parsing.stepped import SteppedParser

TAG = Marker("<|python_tag|>")


class Llama3JsonParser(SteppedParser):
    """`names` are the request's tools."""

    def __init__(self, new_id: Callable[[], str], names: Collection[str], *, single: bool) -> None:
        super().__init__(TAG, new_id, single=single)
        self._names = names
        self._step = self._first

    def _first(self) -> bool:
        rest = self._text.lstrip()
        if not rest:
            return False
        if rest[0] != "{":
            return self._go(self._free)
        return self._begin_object(self._names)

    def _behind_marker(self) -> bool:
        return self._begin_object()

    def _after_object(self) -> bool:
        rest = self._text.lstrip()
        if rest.startswith(";"):
            self._markup = self._take(len(self._text) - len(rest) + 1)
            return self._begin_object(self._names)
        if rest:
            return self._go(self._free)
        if self._last:
            self._text = ""
        return False

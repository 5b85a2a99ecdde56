"""Tells a model's thinking, between <think> and </think>, from the rest of its text.

Contract: thinking comes first or not at all. The space around the markers goes with them.
"""

from collections.abc import Sequence

from ropeway.serving.parsing.markers import Marker
from ropeway.serving.parsing.pieces import OutputParser, Piece, Reasoning

OPEN = Marker("<think>")
CLOSE = Marker("</think>")


def is_open(prompt_end: str) -> bool:
    """Whether a prompt that ends so leaves the model thinking."""
    begun = prompt_end.rstrip().endswith(OPEN.text)
    continued = prompt_end.lstrip().startswith(OPEN.text) and CLOSE.text not in prompt_end
    return begun or continued


class ThinkParser:
    """`rest` reads what isn't thinking. With `opened` the prompt has begun the thinking, which
    some models then begin once more; thinking that never ends is all there is."""

    def __init__(self, rest: OutputParser, *, opened: bool) -> None:
        self._rest = rest
        self._opened = opened
        self._text = ""  # not taken by any step yet
        self._step = self._begin
        self._pieces: list[Piece] = []

    @property
    def called(self) -> bool:
        """See OutputParser.called."""
        return self._rest.called

    def push(self, text: str) -> Sequence[Piece]:
        """See OutputParser.push."""
        if self._step == self._pass_on:
            return self._rest.push(text)
        self._text += text
        while self._text and self._step():
            pass
        return self._taken()

    def finish(self) -> Sequence[Piece]:
        """See OutputParser.finish."""
        if self._step == self._think or (self._opened and self._step == self._begin):
            self._show(self._text.lstrip() if self._step == self._begin else self._text)
        elif self._text:
            self._pieces += self._rest.push(self._text)
        self._pieces += self._rest.finish()
        return self._taken()

    def _begin(self) -> bool:
        length = OPEN.length_at_start(self._text)
        if not length and OPEN.may_begin(self._text):
            return False
        self._text = self._text[length:]
        self._step = self._skip_space if length or self._opened else self._pass_on
        return True

    def _skip_space(self) -> bool:
        self._text = self._text.lstrip()
        if self._text:
            self._step = self._think
        return bool(self._text)

    def _think(self) -> bool:
        found = CLOSE.find(self._text)
        begin, end = found or (CLOSE.certain(self._text), 0)
        self._show(self._text[:begin])
        self._text = self._text[end or begin :]
        if found:
            self._step = self._skip_space_behind
        return found is not None

    def _skip_space_behind(self) -> bool:
        self._text = self._text.lstrip()
        if self._text:
            self._step = self._pass_on
        return bool(self._text)

    def _pass_on(self) -> bool:
        self._pieces += self._rest.push(self._text)
        self._text = ""
        return False

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(Reasoning(text))

    def _taken(self) -> Sequence[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

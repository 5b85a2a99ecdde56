"""What the parsers of tool calls share: text that waits, calls as they are read, what goes wrong.

A parser is a set of steps. A step looks at the text that waits, takes what it is certain about and
says whether it got on; since it decides by that text alone, cuts make no difference.
"""

from collections.abc import Callable, Collection, Sequence

from ropeway.serving.parsing.call_object import CallObject
from ropeway.serving.parsing.markers import Marker
from ropeway.serving.parsing.pieces import CallArguments, CallStart, Content, Piece


class SteppedParser:
    """Free text in which `marker` begins a call; a subclass says what stands behind the marker.

    A call that breaks before it could be announced is content, its marker too. Once announced it
    stays: what isn't a call's text any more is content. With `single`, the text after the first
    whole call is dropped.
    """

    def __init__(self, marker: Marker, new_id: Callable[[], str], *, single: bool) -> None:
        self.called = False
        self._marker = marker
        self._new_id = new_id
        self._single = single
        self._text = ""  # not taken by any step yet
        self._markup = ""  # taken, and content if no call comes of it
        self._last = False  # nothing follows `_text`
        self._count = 0
        self._pieces: list[Piece] = []
        self._step: Callable[[], bool] = self._free
        self._call = CallObject()

    def push(self, text: str) -> Sequence[Piece]:
        """See OutputParser.push."""
        self._text += text
        self._run()
        return self._taken()

    def finish(self) -> Sequence[Piece]:
        """See OutputParser.finish."""
        self._last = True
        self._run()
        if self._step == self._object and not self._call.started:
            self._markup += self._call.held
        self._show(self._markup + self._text)
        self._text = self._markup = ""
        return self._taken()

    def _behind_marker(self) -> bool:
        """The step after a marker."""
        raise NotImplementedError

    def _after_object(self) -> bool:
        """The step after a whole call object."""
        raise NotImplementedError

    def _run(self) -> None:
        while (self._text or self._last) and self._step():
            pass

    def _taken(self) -> Sequence[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _show(self, text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, Content):
            self._pieces[-1] = Content(last.text + text)
        else:
            self._pieces.append(Content(text))

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken

    def _go(self, step: Callable[[], bool]) -> bool:
        self._step = step
        return True

    def _free(self) -> bool:
        """Content, up to the next marker."""
        found = self._marker.find(self._text)
        if found is None:
            self._show(self._take(self._marker.certain(self._text)))
            return False
        begin, end = found
        self._show(self._take(begin))
        self._markup = self._take(end - begin)
        return self._go(self._behind_marker)

    def _plain(self) -> bool:
        """Content, whatever it looks like."""
        self._show(self._take(len(self._text)))
        return False

    def _dropped(self) -> bool:
        self._take(len(self._text))
        return False

    def _skip_space(self) -> bool:
        """The space behind a marker goes with it."""
        self._text = self._text.lstrip()
        return bool(self._text) and self._go(self._free)

    def _begin_object(self, names: Collection[str] | None = None) -> bool:
        self._call = CallObject(names)
        return self._go(self._object)

    def _object(self) -> bool:
        call, announced = self._call, self._call.started
        self._take(call.feed(self._text, 0))
        if call.started and not announced:
            self._announce(call.name)
        self._argue(call.take_arguments())
        if call.state == "open":
            return False
        if call.state == "broken":
            self._markup += call.held
            return self._give_up(call.started)
        return self._end_call(self._after_object)

    def _announce(self, name: str, call_id: str | None = None) -> None:
        """A call is certain to be one."""
        self.called = True
        self._markup = ""
        self._pieces.append(CallStart(self._count, call_id or self._new_id(), name))
        self._count += 1

    def _argue(self, text: str) -> None:
        if text:
            self._pieces.append(CallArguments(self._count - 1, text))

    def _end_call(self, then: Callable[[], bool]) -> bool:
        return self._go(self._dropped if self._single else then)

    def _give_up(self, started: bool) -> bool:
        """No call, or no more of it: what was read is content after all."""
        self._show(self._markup)
        self._markup = ""
        return self._go(self._plain if started and self._single else self._free)

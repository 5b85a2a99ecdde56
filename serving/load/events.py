"""Server-sent events out of bytes that are cut anywhere."""

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventSplitter:
    """Collects the data of each event; comments and other fields are skipped.

    Line ends, fields and the blank line that sends an event off are those of the HTML standard,
    section 9.2 (server-sent events); an event that no blank line ends is dropped, as there.
    """

    def __init__(self) -> None:
        self._rest = b""  # the beginning of a line
        self._data: list[bytes] = []
        self._after_return = False  # a line feed at the front belongs to a line that has ended

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that `piece` completes."""
        if self._after_return and piece.startswith(b"\n"):
            piece = piece[1:]
            self._after_return = False
        if not piece:
            return []
        self._after_return = piece.endswith(b"\r")
        lines = _LINE_END.split(self._rest + piece)
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line == b"data":
                self._data.append(b"")
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

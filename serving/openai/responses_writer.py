"""The items of a response and the events that build them, from one choice's pieces.

Contract: an item begins with output_item.added and ends with output_item.done; the text of a
message or of reasoning runs inside a content part. The items that the events build are those of the
whole answer.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from ropeway.serving.openai.logprobs import TokenLogprob
from ropeway.serving.openai.responses_answer import (
    FunctionCallOutput,
    MessageOutput,
    OutputItem,
    OutputText,
    ReasoningOutput,
    ReasoningText,
    Status,
)
from ropeway.serving.parsing.pieces import CallStart, Content, Piece, Reasoning

_encode = msgspec.json.Encoder().encode


class EventLog:
    """Numbers and collects events, until they are taken."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._number = 0

    def take(self) -> bytes:
        """The events since the last time."""
        events, self._events = self._events, []
        return b"".join(events)

    def add(self, kind: str, **members: Any) -> None:
        """An event of `kind`."""
        self.add_encoded(kind.encode(), _encode({"type": kind, **members})[:-1])

    def add_encoded(self, kind: bytes, data: bytes) -> None:
        """An event whose data, a JSON object without its closing brace, is encoded already."""
        self._events.append(
            b'event: %b\ndata: %b,"sequence_number":%d}\n\n' % (kind, data, self._number)
        )
        self._number += 1


class _OpenItem:
    """The item that pieces go to; adds its events to `log`."""

    def __init__(self, item: OutputItem, index: int, log: EventLog) -> None:
        self.item = item
        self._log = log
        self._index = index
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        log.add("response.output_item.added", output_index=index, item=item)
        self._place: dict[str, Any] = {"item_id": item.id, "output_index": index}
        self._kind = "response.function_call_arguments"
        if not isinstance(item, FunctionCallOutput):
            part: OutputText | ReasoningText = OutputText(text="")
            self._kind = "response.output_text"
            if isinstance(item, ReasoningOutput):
                part = ReasoningText(text="")
                self._kind = "response.reasoning_text"
            self._place["content_index"] = 0
            log.add("response.content_part.added", **self._place, part=part)
        kind = f"{self._kind}.delta"
        self._delta_kind = kind.encode()
        self._delta = _encode({"type": kind, **self._place})[:-1] + b',"delta":'

    def write(self, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        """More of its text, or of its arguments."""
        self._texts.append(text)
        data = self._delta + _encode(text)
        if isinstance(self.item, MessageOutput):
            self._logprobs += logprobs
            data += b',"logprobs":' + _encode(logprobs)
        self._log.add_encoded(self._delta_kind, data)

    def close(self, status: Status) -> None:
        """The item is whole, or will never be."""
        item, text = self.item, "".join(self._texts)
        done = f"{self._kind}.done"
        if isinstance(item, FunctionCallOutput):
            item.arguments = text
            self._log.add(done, **self._place, name=item.name, arguments=text)
        elif isinstance(item, MessageOutput):
            item.content = [OutputText(text=text, logprobs=self._logprobs)]
            self._log.add(done, **self._place, text=text, logprobs=self._logprobs)
        else:
            item.content = [ReasoningText(text=text)]
            self._log.add(done, **self._place, text=text)
        if not isinstance(item, FunctionCallOutput):
            self._log.add("response.content_part.done", **self._place, part=item.content[0])
        item.status = status
        self._log.add("response.output_item.done", output_index=self._index, item=item)


class ItemWriter:
    """Turns pieces into `items`, and their events into those of `log`."""

    def __init__(self, log: EventLog) -> None:
        self.items: list[OutputItem] = []
        self.reasoning: list[str] = []  # all of the model's thinking
        self._log = log
        self._open: _OpenItem | None = None

    def add(self, pieces: Sequence[Piece], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Take the next pieces; `logprobs` go with the first text among them."""
        for piece in pieces:
            if isinstance(piece, CallStart):
                self._begin(
                    FunctionCallOutput(
                        id=_new_id("fc"),
                        status="in_progress",
                        call_id=piece.call_id,
                        name=piece.name,
                    )
                )
                continue
            if isinstance(piece, Content):
                self._write(MessageOutput, "msg", piece.text, logprobs)
                logprobs = ()
            elif isinstance(piece, Reasoning):
                self.reasoning.append(piece.text)
                self._write(ReasoningOutput, "rs", piece.text, ())
            elif self._open is not None:
                self._open.write(piece.text, ())

    def finish(self, status: Status) -> None:
        """No more pieces come; `status` is the last item's. An answer of nothing is an empty
        message."""
        if not self.items:
            self._begin(MessageOutput(id=_new_id("msg"), status="in_progress"))
        self._close(status)

    def _write(
        self,
        kind: type[MessageOutput] | type[ReasoningOutput],
        prefix: str,
        text: str,
        logprobs: Sequence[TokenLogprob],
    ) -> None:
        if self._open is None or not isinstance(self._open.item, kind):
            self._begin(kind(id=_new_id(prefix), status="in_progress"))
        if self._open is not None:
            self._open.write(text, logprobs)

    def _begin(self, item: OutputItem) -> None:
        self._close("completed")
        self._open = _OpenItem(item, len(self.items), self._log)
        self.items.append(item)

    def _close(self, status: Status) -> None:
        if self._open is not None:
            self._open.close(status)
            self._open = None


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"

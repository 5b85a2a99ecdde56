"""One request's answer as it comes: when the first text came, and each chunk, or what went wrong.

Contract: `ended` is set exactly once; every failure has a kind, a short phrase that is the same for
like failures so that they can be counted, and a detail.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ropeway.serving.load.events import EventSplitter

MOST_DETAIL = 300  # characters


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are of time.perf_counter, in seconds.

    It was `due` by the schedule, waited `slot_wait` seconds for one of the allowed requests to end,
    and `began` then. `chunks` are the moments of pieces with text, or of the end where there was
    none. `output_tokens` is the server's count, or that of the chunks where it gave none (`counted`
    is false).
    """

    due: float
    began: float = 0.0
    ended: float = 0.0
    slot_wait: float = 0.0
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False
    error: str = ""
    detail: str = ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        """Whether a reader would see something new."""
        if self.delta is None:
            return bool(self.text)
        delta = self.delta
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Answer:
    """Listens to one streamed answer and fills an Outcome."""

    def __init__(self, outcome: Outcome, ended: "asyncio.Future[None]") -> None:
        self.outcome = outcome
        self._ended = ended
        self._status = 0
        self._events: EventSplitter | None = None
        self._body = b""  # of an answer that isn't a stream
        self._complete = False
        self._finished = False  # a finish reason came

    def head(self, status: int, content_type: str) -> None:
        """See Listener.head."""
        self._status = status
        if status == 200 and content_type.startswith("text/event-stream"):
            self._events = EventSplitter()

    def body(self, piece: bytes, at: float) -> None:
        """See Listener.body."""
        if self._events is None:
            if len(self._body) < 1 << 16:
                self._body += piece
            return
        for data in self._events.feed(piece):
            self._take(data, at)

    def _take(self, data: bytes, at: float) -> None:
        outcome = self.outcome
        if data == b"[DONE]":
            self._complete = True
            return
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._note("bad answer: an event that isn't a chunk", f"{error}: {data[:100]!r}")
            return
        if chunk.error is not None:
            self._note("error event", _message(chunk.error))
        for choice in chunk.choices or ():
            finished = choice.finish_reason is not None
            self._finished = self._finished or finished
            if choice.has_text or (finished and not outcome.chunks):
                outcome.chunks.append(at)
                break
        if chunk.usage is not None:
            usage = chunk.usage
            outcome.prompt_tokens = usage.prompt_tokens
            outcome.output_tokens = usage.completion_tokens
            outcome.counted = True
            if usage.prompt_tokens_details is not None:
                outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0

    def done(self, at: float) -> None:
        """See Listener.done."""
        if self._status != 200:
            self._note(f"HTTP {self._status}", _explain(self._body))
        elif self._events is None:
            self._note("bad answer: not an event stream", _explain(self._body))
        elif not (self._complete or self._finished):
            self._note("bad answer: the stream ended early", "no [DONE] and no finish reason")
        if not self.outcome.counted:
            self.outcome.output_tokens = len(self.outcome.chunks)
        self.outcome.ended = at
        self._end()

    def lost(self, kind: str, detail: str = "") -> None:
        """See Listener.lost."""
        amid = " amid the answer" if self.outcome.chunks else ""
        self._note(kind + amid, detail or f"after {len(self.outcome.chunks)} chunks")
        self._end()

    def fail(self, kind: str, detail: str) -> None:
        """Give up on it."""
        self._note(kind, detail)
        self._end()

    def _note(self, kind: str, detail: str) -> None:
        """The first thing that went wrong is the cause of the others."""
        if not self.outcome.error:
            self.outcome.error = kind
            self.outcome.detail = " ".join(detail.split())[:MOST_DETAIL]

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


def _explain(body: bytes) -> str:
    """The message in an error object, or the body as it is."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode(errors="replace")
    return _message(found.get("error", found) if isinstance(found, dict) else found)


def _message(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error)

"""Server-sent events: a lean ASGI response.

Contract: nothing is sent before the first chunk, so an error up to there is an answer with a status
of its own; a later one is an event. One ASGI send for each chunk that the iterator gives, which may
hold several events. While the iterator is silent, comments keep proxies from giving up. However it
ends, the iterator is closed.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable

import msgspec
from starlette.types import Receive, Scope, Send

from ropeway.serving.errors import ApiError
from ropeway.serving.http.errors import DeadlineError

KEEP_ALIVE = 15.0  # seconds of silence before a comment
_COMMENT = b": keep-alive\n\n"


def error_event(error: ApiError) -> bytes:
    """How OpenAI's chat and completion streams report an error: as data, then the end."""
    return b"data: " + msgspec.json.encode(error.body) + b"\n\ndata: [DONE]\n\n"


class EventStream:
    """`chunks` yields whole events as bytes, the closing one too; `error_event` words an error
    that comes after the first of them."""

    status_code = 200

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        error_event: Callable[[ApiError], bytes] = error_event,
    ) -> None:
        self.raw_headers: list[tuple[bytes, bytes]] = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would collect the events
        ]
        self._chunks = chunks
        self._error_event = error_event
        self._explain: Callable[[Exception], ApiError] | None = None
        self._deadline: float | None = None
        self._started = False
        self._late = False
        self._last = 0.0  # loop time of the last write

    def attach(self, explain: Callable[[Exception], ApiError], deadline: float | None) -> None:
        """What turns a failure into an answer, and the loop time at which a TimeoutError is one."""
        self._explain = explain
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Raises what the iterator raised before its first chunk."""
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        idle = asyncio.create_task(self._comment_when_idle(send))
        timer = self._deadline and loop.call_at(self._deadline, self._cut, asyncio.current_task())
        try:
            try:
                await self._pump(send, loop)
            except asyncio.CancelledError:
                if not self._late:
                    raise
                _uncancel()
                raise DeadlineError from None
        except Exception as error:
            if not self._started or self._explain is None:
                raise
            await self._write(send, self._error_event(self._explain(error)))
        finally:
            if timer:
                timer.cancel()
            idle.cancel()
            await self._chunks.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send, loop: asyncio.AbstractEventLoop) -> None:
        async for chunk in self._chunks:
            if not self._started:
                await self._start(send)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._last = loop.time()

    async def _start(self, send: Send) -> None:
        self._started = True
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)

    async def _write(self, send: Send, data: bytes) -> None:
        if not self._started:
            await self._start(send)
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _comment_when_idle(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._last + KEEP_ALIVE - loop.time())
            if loop.time() - self._last >= KEEP_ALIVE:
                await self._write(send, _COMMENT)
                self._last = loop.time()

    def _cut(self, task: "asyncio.Task[None] | None") -> None:
        if task is not None:
            self._late = True
            task.cancel()


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()

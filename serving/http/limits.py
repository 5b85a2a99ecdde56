"""The HTTP protocol with limits: on headers, on the time that they take, on pipelined requests.

Contract: what isn't HTTP, and what is over a limit, gets an OpenAI error object and its connection
is closed; no other connection notices.
"""

import asyncio

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ropeway.serving.errors import ApiError

HEADER_SECONDS = 30.0  # from a request's first byte to the end of its headers
_MAX_PIPELINED = 16
_MAX_IGNORED = 256 << 20


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol over httptools. `max_header_bytes` counts the request line too."""

    max_header_bytes = 64 << 10

    _in_headers = True  # of the next request, from its first byte on
    _received = 0  # bytes since then
    _ignored = 0  # bytes of bodies whose requests have been answered already
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._received += len(data)
        super().data_received(data)
        # Headers that never end aren't seen by on_headers_complete.
        if self._in_headers and self._received > self.max_header_bytes:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        if self._timer is None:
            self._start_timer()
        self._in_headers = True

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._in_headers = False
        self._received = 0
        self._stop_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self.transport.is_closing():
            return
        if size > self.max_header_bytes:
            self._refuse_headers()
        elif len(self.pipeline) >= _MAX_PIPELINED:
            self._refuse(ApiError(400, "too many requests wait on this connection"))
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See httptools. A body that nobody wanted is read to its end, so that the client sees why;
        within limits."""
        if self.cycle.response_complete:
            self._ignored += len(body)
            if self._ignored > _MAX_IGNORED:
                self.transport.close()
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        self._in_headers = True  # what follows is another request
        if not self.transport.is_closing():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for what it can't parse."""
        self._refuse(ApiError(400, "this isn't a valid HTTP request", code="invalid_http"))

    def _refuse_headers(self) -> None:
        self._refuse(
            ApiError(
                431,
                f"the request's headers are larger than {self.max_header_bytes} bytes",
                code="headers_too_large",
            )
        )

    def _refuse(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        busy = self.cycle is not None and self.cycle.response_started
        if not busy or self.cycle.response_complete:
            self.transport.write(_whole_answer(error))
        self.transport.close()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self._out_of_time)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _out_of_time(self) -> None:
        self._timer = None
        self._refuse(ApiError(408, f"no whole request came within {HEADER_SECONDS:g} s"))


def limited(max_header_bytes: int) -> type[LimitedProtocol]:
    """The protocol with this limit; uvicorn makes one for each connection."""
    return type("Protocol", (LimitedProtocol,), {"max_header_bytes": max_header_bytes})


def _whole_answer(error: ApiError) -> bytes:
    body = msgspec.json.encode(error.body)
    return (
        STATUS_LINE[error.status]
        + b"content-type: application/json\r\nconnection: close\r\n"
        + b"content-length: %d\r\n\r\n" % len(body)
        + body
    )

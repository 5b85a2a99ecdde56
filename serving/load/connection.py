"""HTTP/1.1 for a load generator: a protocol on httptools that costs microseconds a chunk.

Contract: one request at a time on a connection; its listener hears of everything that comes, with
the moment at which it came, and then of exactly one end: `done` or `lost`.
"""

import asyncio
import ssl
import time
from typing import Protocol, cast

import httptools


class Listener(Protocol):
    """Who waits for an answer. Times are of time.perf_counter."""

    def head(self, status: int, content_type: str) -> None:
        """The headers are there."""
        ...

    def body(self, piece: bytes, at: float) -> None:
        """Bytes of the body, without the chunks' frame."""
        ...

    def done(self, at: float) -> None:
        """The answer is whole."""
        ...

    def lost(self, kind: str, detail: str = "") -> None:
        """It will never be; `kind` is the same for like causes."""
        ...


class Connection(asyncio.Protocol):
    """A connection to the server, kept open between requests as long as both sides agree."""

    def __init__(self) -> None:
        self.reusable = False
        self.untouched = True  # nothing was received for the present request
        self._listener: Listener | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._content_type = ""
        self._headed = False
        self._framed = False  # a header says where the body ends
        self._arrived = 0.0

    def send(self, request: bytes, listener: Listener) -> None:
        """Write a request; its answer goes to `listener`."""
        self._listener = listener
        self.reusable = False
        self.untouched = True
        self._content_type = ""
        self._headed = self._framed = False
        if self._transport is None or self._transport.is_closing():
            self._lose("connection closed")
        else:
            self._transport.write(request)

    def close(self) -> None:
        """End it at once; the listener isn't told."""
        self._listener = None
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._arrived = time.perf_counter()
        self.untouched = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lose("bad answer: not HTTP", str(error))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol. A body whose end no header tells ends with the connection."""
        self._transport = None
        if exc is None and self._headed and not self._framed:
            self.on_message_complete()
        self.reusable = False
        self._lose("connection closed", str(exc or ""))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, from the parser."""
        if name.lower() == b"content-type":
            self._content_type = value.decode("latin-1")
        elif name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        """All headers are there, from the parser."""
        self._headed = True
        if self._listener is not None:
            self._listener.head(self._parser.get_status_code(), self._content_type)

    def on_body(self, piece: bytes) -> None:
        """Bytes of the body, from the parser."""
        if self._listener is not None:
            self._listener.body(piece, self._arrived)

    def on_message_complete(self) -> None:
        """The body has ended, from the parser."""
        listener, self._listener = self._listener, None
        self.reusable = self._transport is not None and self._parser.should_keep_alive()
        if listener is not None:
            listener.done(self._arrived)

    def _lose(self, kind: str, detail: str = "") -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.lost(kind, detail)


class Pool:
    """Connections to one server; as many as there are open requests."""

    def __init__(self, host: str, port: int, *, tls: bool) -> None:
        self._address = (host, port)
        self._tls = ssl.create_default_context() if tls else None
        self._idle: list[Connection] = []

    async def take(self) -> tuple[Connection, bool]:
        """A connection, and whether it was used before; raises OSError."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection, True
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, *self._address, ssl=self._tls)
        return connection, False

    def give_back(self, connection: Connection) -> None:
        """The request is over: keep the connection if it can take another."""
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

"""HTTP over a socket of one's own: for clients that don't behave."""

import json
import socket
import struct
from typing import Any

from support.server import RunningServer


def connect(server: RunningServer, *, buffer: int | None = None) -> socket.socket:
    """A connection to the server; `buffer`: bytes that the kernel keeps for a slow reader."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(30)
    connection.connect((host, int(port)))
    return connection


def request_bytes(path: str, body: dict[str, Any], *, close: bool = False) -> bytes:
    """A POST of JSON, as it goes over the wire."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n" + ("Connection: close\r\n" if close else "")
    return head.encode() + b"\r\n" + content


def ask(server: RunningServer, path: str, body: dict[str, Any], **options: Any) -> socket.socket:
    """Send a request and read nothing."""
    connection = connect(server, **options)
    connection.sendall(request_bytes(path, body))
    return connection


def reset(connection: socket.socket) -> None:
    """Go away without a goodbye: the peer sees a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)

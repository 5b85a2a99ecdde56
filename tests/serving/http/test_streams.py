"""Streams and handlers that fail, wait, or lose their client: a real uvicorn, fake endpoints."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from support.http_app import HttpApp, http_app
from support.server import wait_until

from ropeway.compiler.errors import RequestError
from ropeway.serving.errors import ApiError
from ropeway.serving.http import event_stream, limits
from ropeway.serving.http.body import json_answer, read_body
from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.endpoint import Answer, Endpoint
from ropeway.serving.http.event_stream import EventStream

Chunks = AsyncGenerator[bytes, None]


def streaming(chunks: Callable[[], Chunks]) -> Endpoint:
    """POST / answers with these chunks."""

    async def handler(request: Request, context: ServerContext) -> Answer:
        await read_body(request, context)
        return EventStream(chunks())

    return Endpoint("/", "POST", handler, "")


def answering(work: Callable[[], Any]) -> Endpoint:
    """POST / answers with what this coroutine gives."""

    async def handler(request: Request, context: ServerContext) -> Answer:
        await read_body(request, context)
        return json_answer(await work())

    return Endpoint("/", "POST", handler, "")


def post(app: HttpApp) -> httpx.Response:
    return httpx.post(f"http://127.0.0.1:{app.port}/", json={}, timeout=30)


def raw_post(app: HttpApp) -> socket.socket:
    """The request on a socket of one's own, with a small buffer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", app.port))
    connection.sendall(
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 2\r\n\r\n{}"
    )
    return connection


def test_chunks_come_as_they_are_made() -> None:
    release = threading.Event()

    async def chunks() -> Chunks:
        yield b"data: 1\n\ndata: 2\n\n"
        await asyncio.to_thread(release.wait, 20)
        yield b"data: [DONE]\n\n"

    with (
        http_app([streaming(chunks)]) as app,
        httpx.stream("POST", f"http://127.0.0.1:{app.port}/", json={}) as answer,
    ):
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        parts = answer.iter_bytes()
        assert next(parts) == b"data: 1\n\ndata: 2\n\n"
        release.set()
        assert b"".join(parts) == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ApiError(429, "too many", headers={"Retry-After": "7"}), 429, "too many"),
        (RequestError("prompt", "is empty"), 400, "prompt: is empty"),
        (ValueError("secret"), 500, "internal error"),
    ],
)
def test_an_error_before_the_first_chunk_has_its_own_status(
    error: Exception, status: int, message: str
) -> None:
    async def chunks() -> Chunks:
        raise error
        yield b""

    async def work() -> None:
        raise error

    for endpoint in (streaming(chunks), answering(work)):
        with http_app([endpoint]) as app:
            answer = post(app)
            assert answer.status_code == status
            assert message in answer.json()["error"]["message"]
            assert "secret" not in answer.text
            assert answer.headers.get("retry-after") == ("7" if status == 429 else None)
            assert ("Traceback" in app.log.getvalue()) == (status == 500)
            if status == 500:
                assert answer.headers["x-request-id"] in answer.text
                assert answer.headers["x-request-id"] in app.log.getvalue()


def test_an_error_after_the_first_chunk_is_an_event() -> None:
    async def chunks() -> Chunks:
        yield b"data: 1\n\n"
        raise ApiError(503, "the engine died", kind="server_error")

    with http_app([streaming(chunks)]) as app:
        answer = post(app)
    assert answer.status_code == 200
    first, error, done = answer.text.strip().split("\n\n")
    assert (first, done) == ("data: 1", "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the engine died"


@pytest.mark.parametrize("began", [False, True])
def test_a_client_that_leaves_cancels(began: bool) -> None:
    cancelled: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append("x")
            raise

    async def chunks() -> Chunks:
        if began:
            yield b"data: 1\n\n"
        await wait()
        yield b""

    for endpoint in (streaming(chunks), answering(wait)):
        with http_app([endpoint]) as app:
            cancelled.clear()
            connection = raw_post(app)
            time.sleep(0.2)
            connection.close()
            wait_until(lambda: cancelled == ["x"], 5, "the handler is cancelled once")
            time.sleep(0.1)
            assert cancelled == ["x"]
            assert "Traceback" not in app.log.getvalue()


def test_the_generator_is_closed_when_nobody_reads_on() -> None:
    closed: list[str] = []

    async def chunks() -> Chunks:
        try:
            while True:
                yield b"data: " + b"x" * 1000 + b"\n\n"
                await asyncio.sleep(0)
        finally:
            closed.append("x")

    with http_app([streaming(chunks)]) as app:
        connection = raw_post(app)
        connection.recv(100)
        connection.close()
        wait_until(lambda: closed == ["x"], 5, "the generator is closed")


def test_a_slow_reader_stops_the_generator() -> None:
    made = 0

    async def chunks() -> Chunks:
        nonlocal made
        for _ in range(20_000):
            made += 1
            yield b"x" * 1000
            await asyncio.sleep(0)

    with http_app([streaming(chunks)]) as app:
        connection = raw_post(app)
        wait_until(lambda: made > 100, 5, "it begins")
        time.sleep(0.3)
        stuck = made
        time.sleep(0.3)
        # What lies in between are buffers of the kernel's, and 64 KiB of ours.
        assert made == stuck < 8000
        tail = b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            tail = (tail + connection.recv(1 << 20))[-9:]
        assert made == 20_000
        connection.close()


def test_comments_while_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE", 0.1)

    async def chunks() -> Chunks:
        await asyncio.sleep(0.35)
        yield b"data: 1\n\n"
        await asyncio.sleep(0.25)
        yield b"data: 2\n\n"

    with http_app([streaming(chunks)]) as app:
        text = post(app).text
    before, after = text.split("data: 1\n\n")
    assert set(before.split("\n\n")) == {": keep-alive", ""}
    assert after.endswith("data: 2\n\n")
    assert 2 <= before.count("keep-alive") <= 3
    assert 1 <= after.count("keep-alive") <= 2


@pytest.mark.parametrize("began", [False, True])
def test_deadline(began: bool) -> None:
    async def chunks() -> Chunks:
        if began:
            yield b"data: 1\n\n"
        await asyncio.sleep(60)
        yield b""

    async def work() -> None:
        await asyncio.sleep(60)

    with http_app([streaming(chunks)], request_timeout=0.3) as app:
        answer = post(app)
        error = answer.text.split("\n\n")[1].removeprefix("data: ") if began else answer.text
        assert answer.status_code == (200 if began else 504)
        assert json.loads(error)["error"]["code"] == "deadline_exceeded"
    with http_app([answering(work)], request_timeout=0.3) as app:
        answer = post(app)
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")


def test_a_timeout_of_a_handlers_own_is_no_deadline() -> None:
    async def work() -> None:
        raise TimeoutError("secret")

    with http_app([answering(work)], request_timeout=30.0) as app:
        answer = post(app)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


def test_connections_that_say_nothing_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.3)

    async def work() -> str:
        return "done"

    with http_app([answering(work)]) as app:
        for sent in (b"", b"POST / HT", b"POST / HTTP/1.1\r\nA: b\r\n"):
            with socket.create_connection(("127.0.0.1", app.port), timeout=10) as connection:
                connection.sendall(sent)
                assert connection.recv(1000).startswith(b"HTTP/1.1 408")
        assert post(app).json() == "done"

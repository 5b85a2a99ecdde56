"""Bytes that no client should send: each gets an error object, and nobody else notices."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.server import RunningServer, running_server

CANARY = {"prompt": "canary", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(autouse=True)
def unharmed(http: httpx.Client) -> Iterator[None]:
    """The same request gives the same text before and after each test."""
    before = http.post("/v1/completions", json=CANARY).json()["choices"][0]["text"]
    yield
    after = http.post("/v1/completions", json=CANARY).json()["choices"][0]["text"]
    assert after == before


def exchange(server: RunningServer, data: bytes, seconds: float = 20.0) -> tuple[int, dict, bytes]:
    """Send bytes, read until the server closes: status, error object, headers."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.settimeout(seconds)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it had heard enough
            connection.sendall(data)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"], head.lower()


def post(path: str, body: bytes, *headers: str, kind: str = "application/json") -> bytes:
    """A request that asks for the connection to be closed."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Type: {kind}"]
    lines += [f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x00\x01\x02\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: \x00\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nA: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nA: " + b"a" * 70_000, 431),
        (b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 15_000, 431),
    ],
)
def test_what_is_no_request(server: RunningServer, data: bytes, status: int) -> None:
    found, error, head = exchange(server, data)
    assert found == status
    assert error["type"] == "invalid_request_error"
    assert b"connection: close" in head


DEEP = b'{"prompt":' + b"[" * 200 + b"]" * 200 + b"}"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"{", "JSON"),
        (b"[]", "object"),
        (b'"text"', "object"),
        (b"null", "object"),
        (b"NaN", "JSON"),
        (b"\xef\xbb\xbf{}", "JSON"),
        (b'{"model": "\xff\xfe"}', "UTF-8"),
        (b'{"model": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"model": "\\ud800"}', "JSON"),
        (b'{"model": "\\udc00 "}', "JSON"),
        (b'{"prompt": "a\x00"}', "NUL"),
        (b'{"prompt": "a\\u0000"}', "NUL"),
        (DEEP, "nests"),
        (b"[" * 100_000, "nests"),
    ],
)
def test_bodies(server: RunningServer, path: str, body: bytes, words: str) -> None:
    status, error, _ = exchange(server, post(path, body))
    assert status == 400
    assert words in error["message"], error


def test_backslashes_before_u0000_are_text(http: httpx.Client) -> None:
    text = "\\u0000 and \\\\u0000"
    answer = http.post("/tokenize", json={"prompt": text})
    assert answer.status_code == 200
    assert answer.json()["count"] == len(text)


def test_brackets_in_text_are_no_depth(http: httpx.Client) -> None:
    text = '[[{"\\"' * 60
    assert http.post("/tokenize", json={"prompt": text}).json()["count"] == len(text)


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded", "json"])
def test_types_that_browsers_send_across_sites(server: RunningServer, kind: str) -> None:
    status, error, _ = exchange(server, post("/tokenize", b'{"prompt": "a"}', kind=kind))
    assert (status, error["code"]) == (415, "unsupported_media_type")


def test_json_types_with_parameters(http: httpx.Client) -> None:
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/a+json"):
        answer = http.post("/tokenize", content=b'{"prompt":"a"}', headers={"content-type": kind})
        assert answer.status_code == 200, kind


def test_large_bodies(tiny_artifact: Path) -> None:
    kind = {"content-type": "application/json"}
    large = b'{"prompt": "' + b"a" * 4_000_000 + b'"}'

    def in_chunks() -> Iterator[bytes]:
        for start in range(0, len(large), 5000):
            yield large[start : start + 5000]

    options = ("--max-body-size", "64KiB")
    with running_server(tiny_artifact, *options) as server, server.client() as http:
        fits = http.post("/tokenize", json={"prompt": "a" * 65_000})
        assert fits.json()["count"] == 65_000
        for content in (large, in_chunks()):
            answer = http.post("/tokenize", content=content, headers=kind)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/v1/chat", 404, "not_found"),
        ("GET", "/health/", 404, "not_found"),
        ("GET", "/%00", 404, "not_found"),
        ("GET", "/v1/models/%00%ff", 404, "model_not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/completions", 405, "method_not_allowed"),
        ("TRACE", "/health", 405, "method_not_allowed"),
    ],
)
def test_paths_and_methods(
    server: RunningServer, method: str, path: str, status: int, code: str
) -> None:
    data = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    found, error, head = exchange(server, data)
    assert (found, error["code"]) == (status, code)
    assert (b"\r\nallow: " in head) == (status == 405)


def test_requests_on_one_connection_are_answered_in_turn(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    one = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(one * 4 + one.replace(b"Host: x", b"Connection: close"))
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    assert answer.count(b"HTTP/1.1 200 OK") == 5


def test_a_client_that_leaves_in_the_middle_of_its_body(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for _ in range(20):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(post("/tokenize", b"x" * 100)[:-50])
    assert "Traceback" not in server.text()


def test_expect_100_continue(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    request = post("/tokenize", b'{"prompt": "abc"}', "Expect: 100-continue")
    head, _, body = request.partition(b"\r\n\r\n")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    assert b'"count":3' in answer

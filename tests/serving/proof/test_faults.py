"""Processes that are killed and disks that are full: everybody is told, and service goes on."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.command import PROGRAM
from support.offline_answers import CHAT, TEXT
from support.raw_http import ask, request_bytes
from support.server import RunningServer, is_running, running_server, wait_until

RESPONSES = "/v1/responses"
OPEN: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "a"}),
    (TEXT, {"prompt": ["a", "b"], "n": 2}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    (RESPONSES, {"input": "a"}),
]
CANARY = {"prompt": "a canary", "seed": 3, "max_tokens": 24, "ignore_eos": True}


def endless(path: str, own: dict[str, Any], stream: bool) -> dict[str, Any]:
    """A request that runs for longer than any test."""
    if path == RESPONSES:
        return {**own, "max_output_tokens": 15_000, "stream": stream, "temperature": 0}
    return {**own, "max_tokens": 15_000, "ignore_eos": True, "stream": stream, "temperature": 0}


class Caller(threading.Thread):
    """Sends one request and reads to the end; `ended` is when that came."""

    def __init__(self, server: RunningServer, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.what = f"{path} {'streamed' if body['stream'] else 'whole'}"
        self.started = threading.Event()
        self.status, self.content, self.ended = 0, b"", 0.0
        self.failure = ""
        self._ask = server, path, body
        self.start()

    def run(self) -> None:
        server, path, body = self._ask
        try:
            with server.client() as http, http.stream("POST", path, json=body) as answer:
                self.status = answer.status_code
                for part in answer.iter_bytes():
                    self.content += part
                    self.started.set()
        except httpx.HTTPError as error:
            self.failure = repr(error)
        self.ended = time.monotonic()
        self.started.set()

    def error(self) -> dict[str, Any]:
        """The error that it was told: an event, or the body."""
        assert not self.failure, f"{self.what}: {self.failure}"
        text = self.content.decode()
        assert "error" in text, f"{self.what}: no error: {text[-500:]}"
        if not text.startswith("{"):
            lines = [line for line in text.splitlines() if line.startswith("data: {")]
            event = json.loads(lines[-1].removeprefix("data: "))
            return event.get("error") or event["response"]["error"]
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}, self.what
        return error


def health(http: httpx.Client) -> int:
    return http.get("/health").status_code


def test_a_killed_engine_ends_every_kind_of_request(long_artifact: Path) -> None:
    """Decoding and queued, streamed and whole, at every endpoint; --restart brings service back."""
    options = ("--max-num-seqs", "6", "--kv-cache-memory", "64MiB", "--restart")
    with running_server(long_artifact, *options) as server, server.client() as http:
        right = http.post(TEXT, json=CANARY).json()["choices"][0]["text"]
        [engine] = server.children()
        for _ in range(2):
            kinds = [(path, endless(path, own, s)) for path, own in OPEN for s in (True, False)]
            callers = [Caller(server, path, body) for path, body in kinds * 2]
            wait_until(lambda: http.get("/live").json()["engine"]["running"] == 6, 20, "six run")
            wait_until(lambda: http.get("/live").json()["engine"]["waiting"] > 5, 20, "others wait")
            killed = time.monotonic()
            os.kill(engine, signal.SIGKILL)
            wait_until(lambda: health(http) == 503, 5, "/health is 503")
            for caller in callers:
                caller.join(5)
                assert not caller.is_alive(), f"{caller.what} is still open after 5 s"
                assert caller.ended - killed < 5
                begun = caller.what.endswith("streamed") and caller.status == 200
                assert caller.status == (200 if begun else 503), f"{caller.what} {caller.content!r}"
                assert caller.error()["code"] in ("engine_gone", "server_error"), caller.what
            wait_until(lambda: health(http) == 200, 10, "service is back")
            back = time.monotonic() - killed
            print(f"service is back after {back:.2f} s")
            assert back < 3, f"{back:.2f} s"
            assert http.post(TEXT, json=CANARY).json()["choices"][0]["text"] == right
            [engine] = server.children()
            state = http.get("/live").json()["engine"]
            assert (state["running"], state["waiting"], state["blocks_used"]) == (0, 0, 0)
        assert server.stop() == 0
        assert not is_running(engine)


def test_a_stopped_engine_holds_up_nobody_who_doesnt_need_it(long_artifact: Path) -> None:
    """An engine that is frozen: the HTTP side answers what it can; killed, it is as if it died."""
    with running_server(long_artifact, "--restart") as server, server.client() as http:
        [engine] = server.children()
        os.kill(engine, signal.SIGSTOP)
        caller = Caller(server, *_streamed())
        began = time.monotonic()
        assert http.get("/version").status_code == 200
        assert http.get("/v1/models").status_code == 200
        assert http.post("/tokenize", json={"prompt": "abc"}).json()["count"] == 3
        assert http.post(TEXT, json={"prompt": ""}).status_code == 400
        assert time.monotonic() - began < 3
        os.kill(engine, signal.SIGKILL)
        caller.join(5)
        assert caller.error()["code"] == "engine_gone"
        wait_until(lambda: health(http) == 200, 10, "service is back")


def _streamed() -> tuple[str, dict[str, Any]]:
    return TEXT, endless(TEXT, {"prompt": "a"}, True)


@pytest.mark.parametrize("moment", ["loading", "decoding", "prefilling", "compiling"])
def test_a_killed_http_process_leaves_no_engine(moment: str, long_artifact: Path) -> None:
    if moment == "loading":
        with _spawn(long_artifact, _free_port()) as process:
            wait_until(lambda: _children(process.pid), 10, "the engine starts")
            [engine] = _children(process.pid)
            process.kill()
            wait_until(lambda: not is_running(engine), 5, "the engine ends")
        return
    properties = {f"field{i}": {"type": "string", "maxLength": 90 + i} for i in range(60)}
    bodies: dict[str, dict[str, Any]] = {
        "decoding": endless(TEXT, {"prompt": "a", "n": 4}, True),
        "prefilling": endless(TEXT, {"prompt": [1 + k % 99 for k in range(4900)]}, True),
        "compiling": {
            "prompt": "a",
            "structured_outputs": {"json": {"type": "object", "properties": properties}},
        },
    }
    with running_server(long_artifact) as server:
        [engine] = server.children()
        with ask(server, TEXT, bodies[moment]):
            time.sleep(0.1)
            server.process.kill()
            wait_until(lambda: not is_running(engine), 5, "the engine ends")


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for tasks in listed for child in tasks.read_text().split()]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def _spawn(
    artifact: Path,
    port: int,
    *options: str,
    program: tuple[str, ...] = (str(PROGRAM),),
    **files: Any,
) -> Iterator["subprocess.Popen[bytes]"]:
    """`ropeway serve` with standard streams of one's own."""
    command = [*program, "serve", str(artifact), "--port", str(port), "--threads", "1", *options]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, **files) as process:
        try:
            yield process
        finally:
            process.kill()


def _status(port: int) -> int:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code
    except httpx.TransportError:
        return 0


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_full_disk_under_the_log(log_format: str, long_artifact: Path) -> None:
    """Every line of the log fails to be written: requests, errors and the end are as ever."""
    port = _free_port()
    options = ("--log-requests", "--log-format", log_format, "--restart")
    with (
        open("/dev/full", "wb") as full,
        _spawn(long_artifact, port, *options, stdout=full, stderr=full) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http,
    ):
        wait_until(lambda: _status(port) == 200, 30, "it serves")
        right = http.post(TEXT, json=CANARY).json()["choices"][0]["text"]
        assert http.post(TEXT, json={"prompt": 5}).status_code == 400
        [engine] = _children(process.pid)
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: _status(port) == 503, 5, "unhealthy")
        wait_until(lambda: _status(port) == 200, 10, "it is restarted")
        assert http.post(TEXT, json=CANARY).json()["choices"][0]["text"] == right
        process.terminate()
        assert process.wait(30) == 0


# Whoever takes nothing for five minutes is cut: here for a second and a half.
_IMPATIENT = (
    "import ropeway.serving.http.server as server; server._STUCK = 1500\n"
    "from ropeway.compiler.cli.main import run; run()"
)


def test_a_reader_that_is_stuck_is_cut(long_artifact: Path) -> None:
    """Its request is aborted in the middle: its blocks come back though it never goes."""
    port = _free_port()
    impatient = (sys.executable, "-c", _IMPATIENT)
    body = endless(TEXT, {"prompt": "a", "n": 8, "logprobs": 5, "return_token_ids": True}, True)
    with (
        _spawn(long_artifact, port, program=impatient) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http,
        socket.socket() as reader,
    ):
        wait_until(lambda: _status(port) == 200, 30, "it serves")
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", port))
        reader.sendall(request_bytes(TEXT, body))

        def engine() -> dict[str, Any]:
            return http.get("/live").json()["engine"]

        before = engine()["output_tokens"]
        wait_until(lambda: engine()["blocks_used"] > 0, 10, "it runs")
        wait_until(lambda: engine()["blocks_used"] == 0, 30, "its blocks come back")
        assert engine()["output_tokens"] - before < 8 * 15_000, "it ran to its end instead"
        process.terminate()
        assert process.wait(40) == 0

"""How a server ends, and what it leaves: nothing."""

import json
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.command import PROGRAM
from support.server import RunningServer, is_running, running_server, wait_until

LONG = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}


@contextmanager
def open_stream(server: RunningServer, **changes: object) -> Iterator[Iterator[dict[str, object]]]:
    """A running generation's events, after the first."""
    with (
        server.client() as http,
        http.stream("POST", "/v1/completions", json={**LONG, **changes}) as answer,
    ):
        assert answer.status_code == 200
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        events = (json.loads(line) for line in lines if line != "[DONE]")
        next(events)
        yield events


def finish_reason(events: Iterator[dict[str, object]]) -> object:
    """Read to the end; the reason, or the error's code."""
    last = list(events)[-1]
    if "error" in last:
        return last["error"]["code"]  # type: ignore[index]
    return last["choices"][0]["finish_reason"]  # type: ignore[index]


@pytest.fixture(scope="module")
def slow_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model for so many tokens that an answer can take as long as a test wants."""
    from support.tiny_checkpoint import make_checkpoint  # noqa: PLC0415

    import ropeway  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("slow")
    checkpoint = make_checkpoint(folder / "slow", max_position_embeddings=100_000)
    ropeway.compile(checkpoint, dtype="float32", max_num_batched_tokens=64).save(folder / "s.rope")
    return folder / "s.rope"


FOREVER = {"max_tokens": 99_000}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_finish(slow_artifact: Path, number: int) -> None:
    with running_server(slow_artifact, "--drain-timeout", "200") as server:
        [engine] = server.children()
        with open_stream(server, max_tokens=1500) as events, server.client() as other:
            assert other.get("/ready").status_code == 200
            server.process.send_signal(number)
            wait_until(lambda: other.get("/ready").status_code == 503, 5, "/ready is 503")
            assert other.get("/health").status_code == 200
            refused = other.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            assert refused.json()["error"]["type"] == "server_error"
            assert refused.headers["retry-after"] == "1"
            assert finish_reason(events) == "length"
        assert server.wait() == 0
        assert not is_running(engine)
        assert "may finish" in server.text()


def test_a_second_signal_ends_at_once(slow_artifact: Path) -> None:
    with running_server(slow_artifact) as server:
        [engine] = server.children()
        with open_stream(server, **FOREVER) as events:
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "may finish" in server.text(), 5, "it drains")
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert finish_reason(events) == "engine_gone"
        assert server.wait() == 128 + signal.SIGTERM
        assert time.monotonic() - began < 5
        assert not is_running(engine)


def test_what_doesnt_finish_in_time_is_aborted(slow_artifact: Path) -> None:
    with running_server(slow_artifact, "--drain-timeout", "0.5") as server:
        with open_stream(server, **FOREVER) as events:
            server.process.send_signal(signal.SIGTERM)
            assert finish_reason(events) == "engine_gone"
        assert server.wait() == 0
        assert "1 requests didn't finish" in server.text()


def test_an_idle_server_ends_soon(tiny_artifact: Path) -> None:
    with running_server(tiny_artifact) as server, server.client() as http:
        assert http.get("/health").status_code == 200  # a connection that stays open
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 5


def test_a_killed_server_leaves_no_engine(slow_artifact: Path) -> None:
    with running_server(slow_artifact) as server:
        [engine] = server.children()
        with pytest.raises(httpx.HTTPError), open_stream(server, **FOREVER) as events:
            server.process.kill()
            finish_reason(events)
        wait_until(lambda: not is_running(engine), 5, "the engine ends")


def test_a_killed_engine_is_an_error_event_and_no_health(slow_artifact: Path) -> None:
    with running_server(slow_artifact) as server, server.client() as http:
        [engine] = server.children()
        with open_stream(server, **FOREVER) as events:
            began = time.monotonic()
            os.kill(engine, signal.SIGKILL)
            assert finish_reason(events) == "engine_gone"
            assert time.monotonic() - began < 5
        for path in ("/health", "/ready"):
            answer = http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        assert http.get("/metrics").status_code == 200
        assert server.stop() == 0


def test_restart(tiny_artifact: Path) -> None:
    asked = {"prompt": "abc", "max_tokens": 8, "temperature": 0}
    with running_server(tiny_artifact, "--restart") as server, server.client() as http:
        before = http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        for _ in range(2):
            [engine] = server.children()
            os.kill(engine, signal.SIGKILL)
            wait_until(lambda: http.get("/health").status_code == 503, 5, "unhealthy")
            wait_until(lambda: http.get("/health").status_code == 200, 10, "healthy again")
            after = http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
            assert after == before
        assert server.stop() == 0


def test_a_signal_while_the_engine_loads(tiny_artifact: Path) -> None:
    command = [str(PROGRAM), "serve", str(tiny_artifact), "--port", "0", "--threads", "1"]
    for seconds in (0.15, 0.35, 0.55):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            time.sleep(seconds)
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=30)
        assert process.returncode in (0, -signal.SIGTERM)
        assert "Traceback" not in log, log


def test_the_log_can_break(tiny_artifact: Path) -> None:
    """A full disk, a closed pipe: the server goes on."""
    for broken in ("full", "closed"):
        command = [str(PROGRAM), "serve", str(tiny_artifact), "--port", "0", "--log-requests"]
        read, write = os.pipe()
        with (
            open("/dev/full", "w") as full,
            subprocess.Popen(
                [*command, "--threads", "1"], stderr=write, stdout=full, text=True
            ) as process,
        ):
            os.close(write)
            address = _read_address(read)
            if broken == "closed":
                os.close(read)
            for _ in range(50):
                assert httpx.get(f"{address}/health").status_code == 200
            process.terminate()
            if broken != "closed":
                threading.Thread(target=_swallow, args=(read,), daemon=True).start()
            assert process.wait(30) == 0


def test_closed_standard_streams(tiny_artifact: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = shlex.join([str(PROGRAM), "serve", str(tiny_artifact), "--port", str(port)])
    shell = f"exec {command} --threads 1 --log-requests <&- >&- 2>&-"
    with subprocess.Popen(["bash", "-c", shell]) as process:
        wait_until(lambda: _status(port) == 200, 30, "it serves")
        asked = {"prompt": "abc", "max_tokens": 3}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=30)
        assert answer.status_code == 200
        process.terminate()
        assert process.wait(30) == 0


def _status(port: int) -> int:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code
    except httpx.TransportError:
        return 0


def _read_address(pipe: int) -> str:
    text = ""
    while " serves " not in text:
        part = os.read(pipe, 4096)
        assert part, text
        text += part.decode()
    return next(word for word in text.split() if word.startswith("http://"))


def _swallow(pipe: int) -> None:
    while os.read(pipe, 4096):
        pass


def test_log_lines(tiny_artifact: Path) -> None:
    with running_server(tiny_artifact, "--log-requests") as server:
        with server.client() as http:
            http.get("/health?token=secret")
        wait_until(lambda: any("method" in line for line in server.log), 5, "the request's line")
        steps = {str(line["step"]): line for line in server.log if "step" in line}
        assert list(steps) == ["target", "buckets", "cache", "ready"]
        assert "cpu" in str(steps["target"]["message"])
        assert steps["ready"]["models"] == ["tiny"]
        assert steps["cache"]["kv_blocks"] > 1
        [request] = [line for line in server.log if "method" in line]
        assert (request["path"], request["status"], request["method"]) == ("/health", 200, "GET")
        assert "secret" not in server.text()


def test_requests_arent_logged_unless_asked(server: RunningServer, http: httpx.Client) -> None:
    http.get("/health")
    assert not any("method" in line for line in server.log)

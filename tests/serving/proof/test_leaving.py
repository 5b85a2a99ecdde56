"""Clients that go, stall or never say anything: the others go on, and nothing is left of these."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import census
from support.offline_answers import CHAT, TEXT, differences, offline_answers, served_answer
from support.raw_http import ask, connect, read_all, request_bytes, reset
from support.server import RunningServer, running_server, wait_until

from ropeway import LLM

ENDLESS: dict[str, Any] = {"max_tokens": 15_000, "ignore_eos": True, "temperature": 0}
LONG_PROMPT = [(k * k + 3 * k) % 250 for k in range(19_000)]
CANARY: dict[str, Any] = {"prompt": "a canary", "seed": 3, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def long_server(long_artifact: Path) -> Iterator[RunningServer]:
    """Two sequences at once, so that a third waits."""
    options = ("--max-num-seqs", "2", "--kv-cache-memory", "64MiB")
    with running_server(long_artifact, *options, environment=census.watched()) as server:
        yield server


@pytest.fixture
def long_http(long_server: RunningServer) -> Iterator[httpx.Client]:
    with long_server.client() as client:
        yield client


@pytest.fixture(scope="module")
def canary_answer(long_artifact: Path) -> Any:
    """What the canary must always say."""
    with LLM(long_artifact, num_threads=1) as llm:
        return offline_answers(llm, [(TEXT, CANARY)])[0]


@pytest.fixture(autouse=True)
def nothing_left(
    long_server: RunningServer, long_http: httpx.Client, canary_answer: Any
) -> Iterator[None]:
    """After each test: the canary's right answer, no task, descriptor, request or block more."""
    long_http.get("/live")
    tasks = census.objects(long_server, long_server.pid)["tasks"]
    files = census.footprint(long_server.pid).descriptors
    [engine] = long_server.children()
    yield
    wait_until(lambda: state(long_http) == (0, 0, 0), 10, f"an idle engine: {state(long_http)}")
    answer = long_http.post(TEXT, json=CANARY)
    assert answer.status_code == 200, answer.text
    assert differences(canary_answer, served_answer(TEXT, CANARY, answer.content, 1)) == []
    wait_until(
        lambda: census.footprint(long_server.pid).descriptors <= files, 5, "descriptors are closed"
    )
    after = census.objects(long_server, long_server.pid)
    assert after["tasks"] <= tasks, f"tasks are left: {after['where']}"
    assert long_server.children() == [engine], "the engine died"
    assert "Traceback" not in long_server.text(), long_server.text()


def engine_now(http: httpx.Client) -> dict[str, Any]:
    """The engine's state and totals."""
    return http.get("/live").json()["engine"]


def state(http: httpx.Client) -> tuple[int, int, int]:
    """Requests that run and wait, blocks that they hold."""
    now = engine_now(http)
    return now["running"], now["waiting"], now["blocks_used"]


def _has_drawn(http: httpx.Client, tokens: int) -> bool:
    return bool(engine_now(http)["output_tokens"] > tokens)


def body_of(path: str, stream: bool, **changes: Any) -> dict[str, Any]:
    """A request that goes on for long."""
    own = {"prompt": "a"} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]}
    return {**own, **ENDLESS, "stream": stream, **changes}


GOING: dict[str, Callable[[socket.socket], None]] = {
    "closed": lambda connection: connection.close(),
    "reset": reset,
    "half-closed": lambda connection: connection.shutdown(socket.SHUT_WR),
}


@pytest.mark.parametrize("going", GOING)
@pytest.mark.parametrize("stream", [False, True])
def test_while_it_is_decoded(
    stream: bool, going: str, long_server: RunningServer, long_http: httpx.Client
) -> None:
    for path in (TEXT, CHAT):
        with ask(long_server, path, body_of(path, stream, n=2)) as connection:
            wait_until(lambda: state(long_http)[0] == 2, 10, "both choices run")
            drawn = engine_now(long_http)["output_tokens"]
            wait_until(partial(_has_drawn, long_http, drawn), 10, "decoding")
            GOING[going](connection)
            wait_until(lambda: state(long_http) == (0, 0, 0), 5, "its blocks come back")


@pytest.mark.parametrize("stream", [False, True])
def test_while_it_is_queued(
    stream: bool, long_server: RunningServer, long_http: httpx.Client
) -> None:
    with ask(long_server, TEXT, body_of(TEXT, True, n=2)):
        wait_until(lambda: state(long_http)[0] == 2, 10, "the first runs")
        waiting = [
            ask(long_server, path, body_of(path, stream)) for path in (TEXT, CHAT, TEXT, TEXT)
        ]
        wait_until(lambda: state(long_http)[1] == 4, 10, f"four wait: {state(long_http)}")
        for k, connection in enumerate(waiting):
            (reset if k % 2 else socket.socket.close)(connection)
        wait_until(lambda: state(long_http)[1] == 0, 5, "none waits")
        assert state(long_http)[0] == 2, "the one that runs was touched"


@pytest.mark.parametrize("stream", [False, True])
def test_while_its_prompt_is_computed(
    stream: bool, long_server: RunningServer, long_http: httpx.Client
) -> None:
    for share in (0.02, 0.3):
        before = engine_now(long_http)
        size, total = before["block_size"], before["blocks_total"]
        body = body_of(TEXT, stream, prompt=[int(10 * share), *LONG_PROMPT], max_tokens=5)
        with ask(long_server, TEXT, body):
            wait_until(lambda: state(long_http)[0] == 1, 10, "it runs")
            time.sleep(share)
            now = engine_now(long_http)
            assert now["output_tokens"] == before["output_tokens"], "the prompt was too short"
            assert 0 < now["blocks_used"] <= total, size
        wait_until(lambda: state(long_http) == (0, 0, 0), 5, "its blocks come back")
        assert engine_now(long_http)["output_tokens"] == before["output_tokens"]


def slow_form(k: int) -> dict[str, Any]:
    """A form that takes long to compile; each k another."""
    properties = {f"field{k}x{i}": {"type": "string", "maxLength": 90 + i} for i in range(60)}
    return {"json": {"type": "object", "properties": properties, "required": list(properties)}}


@pytest.mark.parametrize("stream", [False, True])
def test_while_its_grammar_is_compiled(
    stream: bool, long_server: RunningServer, long_http: httpx.Client
) -> None:
    """Those that wait for the compiler are forgotten: the next one needn't wait for them."""
    form = slow_form(1000 + stream)
    began = time.monotonic()
    body = body_of(TEXT, False, structured_outputs=form, max_tokens=1)
    answer = long_http.post(TEXT, json=body)
    assert answer.status_code == 200, answer.text
    one = time.monotonic() - began
    left = [
        ask(
            long_server,
            path,
            body_of(path, stream, structured_outputs=slow_form(20 * stream + k)),
        )
        for k, path in enumerate((TEXT, CHAT) * 6)
    ]
    time.sleep(0.05)
    for connection in left:
        connection.close()
    quick = {"prompt": "a", "structured_outputs": {"choice": ["yes"]}, "temperature": 0}
    began = time.monotonic()
    answer = long_http.post(TEXT, json=quick)
    assert answer.json()["choices"][0]["text"] == "yes"
    assert time.monotonic() - began < 3 * one + 1, f"one takes {one:.2f} s"


def test_half_open_connections(long_server: RunningServer, long_http: httpx.Client) -> None:
    """Hundreds that say nothing, half a header or half a body."""
    whole = request_bytes(TEXT, CANARY)
    files = census.footprint(long_server.pid).descriptors
    opened = []
    for k in range(300):
        opened.append(connect(long_server))
        opened[-1].sendall((b"", whole[:20], whole[:-5])[k % 3])
    wait_until(
        lambda: census.footprint(long_server.pid).descriptors >= files + 300, 10, "all are taken"
    )
    began = time.monotonic()
    assert long_http.post(TEXT, json=CANARY).status_code == 200
    assert time.monotonic() - began < 5
    for k, connection in enumerate(opened):
        (reset if k % 2 else socket.socket.close)(connection)


def test_pipelined_requests(long_server: RunningServer, long_artifact: Path) -> None:
    """Sent at once on one connection: answered in their order, streams among them."""
    bodies = [
        {"prompt": [k + 1] * 5, "seed": k, "max_tokens": 4 + k, "stream": k % 3 == 1}
        for k in range(8)
    ]
    with LLM(long_artifact, num_threads=1) as llm:
        expected = offline_answers(llm, [(TEXT, body) for body in bodies])
    with connect(long_server) as connection:
        last = len(bodies) - 1
        connection.sendall(
            b"".join(request_bytes(TEXT, body, close=k == last) for k, body in enumerate(bodies))
        )
        answers = read_all(connection)
    for body, right in zip(bodies, expected, strict=True):
        head, _, rest = answers.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        content, answers = take_body(head, rest)
        assert differences(right, served_answer(TEXT, body, content, 1)) == []
    assert answers == b""


def take_body(head: bytes, rest: bytes) -> tuple[bytes, bytes]:
    """A body by its length or in chunks, and what follows it."""
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    if lengths:
        size = int(lengths[0].split(b":")[1])
        return rest[:size], rest[size:]
    body = b""
    while True:
        line, _, rest = rest.partition(b"\r\n")
        size = int(line, 16)
        body += rest[:size]
        rest = rest[size + 2 :]
        if size == 0:
            return body, rest


def test_pipelined_requests_that_are_left(
    long_server: RunningServer, long_http: httpx.Client
) -> None:
    """The first runs, the others lie in the connection: all go with it."""
    with connect(long_server) as connection:
        connection.sendall(request_bytes(TEXT, body_of(TEXT, True)) * 5)
        wait_until(lambda: state(long_http)[0] == 1, 10, "the first runs")
        time.sleep(0.2)
        assert state(long_http)[:2] == (1, 0), "the second began before the first had ended"
    wait_until(lambda: state(long_http) == (0, 0, 0), 5, "nothing runs")


READERS = 6


def test_slow_readers(long_server: RunningServer, long_http: httpx.Client) -> None:
    """They ask for much and read nothing. What the server keeps is bounded, others go on, and all
    is given back when they go."""
    [engine] = long_server.children()
    before = {pid: census.footprint(pid).resident for pid in (long_server.pid, engine)}
    body = body_of(TEXT, True, return_token_ids=True, logprobs=5, max_tokens=5000)
    readers = [ask(long_server, TEXT, body, buffer=4096) for _ in range(READERS)]
    peak = 0
    wait_until(lambda: sum(state(long_http)[:2]) == READERS, 10, "all are taken")
    began = time.monotonic()
    while state(long_http) != (0, 0, 0):  # the engine finishes them though nobody reads
        peak = max(peak, census.footprint(long_server.pid).resident - before[long_server.pid])
        asked = time.monotonic()
        assert long_http.get("/health").status_code == 200
        assert time.monotonic() - asked < 2, "others wait for those who don't read"
        assert time.monotonic() - began < 40, f"they don't end: {state(long_http)}"
        time.sleep(0.1)
    peak = max(peak, census.footprint(long_server.pid).resident - before[long_server.pid])
    grown = census.footprint(engine).resident - before[engine]
    print(f"slow readers: HTTP process +{peak >> 20} MiB, engine +{grown >> 20} MiB")
    for reader in readers[1:]:
        reader.close()
    raw = b""
    while b"data: [DONE]" not in raw[-40:]:  # the first reads on: nothing was lost
        raw += readers[0].recv(1 << 16)
    readers[0].close()
    assert raw.count(b"data: ") > 100
    last = json.loads(raw.split(b"data: ")[-2].partition(b"\n")[0])
    assert last["choices"][0]["finish_reason"] == "length"
    assert peak < 64 << 20, f"{peak >> 20} MiB for {READERS} readers"
    assert os.path.exists(f"/proc/{engine}")

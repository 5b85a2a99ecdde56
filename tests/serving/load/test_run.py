"""Runs against a server whose delays are known."""

import asyncio
import math
import time

import pytest
from support.fake_openai import (
    HANG_UP,
    HEAD,
    Asked,
    FakeServer,
    Script,
    event,
    fake_server,
    framed,
    refusal,
    stream,
    text_chunk,
    usage_chunk,
)

from ropeway.compiler.errors import RunError
from ropeway.serving.load.summary import Summary
from ropeway.serving.load.sweep import Sweep
from ropeway.serving.load.target import Target
from ropeway.serving.load.workload import Ask, Synthetic, Written

# How much later than planned processes on a busy machine may see something, in milliseconds.
SLACK = 5000.0


def quiet(what: str, done: int, total: int) -> None:
    """Takes progress."""


def load(server: FakeServer, count: int, rate: float = math.inf, **options: object) -> Summary:
    """One run of `count` requests."""
    settings = {
        "target": Target.parse(server.url, "key"),
        "model": "fake",
        "chat": False,
        "workload": Synthetic([(3, 4)] * count, seed=0),
        "rates": [rate],
        **options,
    }
    [summary], interrupted = Sweep(**settings).run(quiet)  # type: ignore[arg-type]
    assert not interrupted
    return summary


def test_times_are_those_of_the_server() -> None:
    def answer(number: int, asked: Asked) -> Script:
        return stream(0.1 if number % 2 else 0.3, [0.02, 0.02, 0.08], cached=2)

    with fake_server(answer) as server:
        found = load(server, 8)
    assert found.completed == found.requests == found.most_open == 8
    assert found.errors == {}
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (56, 16, 32)
    assert found.ttft_ms and found.tpot_ms and found.itl_ms and found.e2e_ms
    assert 200 <= found.ttft_ms.p50 < 200 + SLACK  # between 100 and 300
    assert 300 <= found.ttft_ms.p99 < 300 + SLACK
    assert found.tpot_ms.p50 < 40 + SLACK / 3  # 120 ms over three tokens
    assert found.itl_ms.max < 80 + SLACK
    assert 418 <= found.e2e_ms.max < 420 + SLACK
    assert 0.41 < found.duration_s < 0.42 + SLACK / 1e3
    assert found.tokens_per_chunk == 1.0
    assert found.requests_per_s == pytest.approx(8 / found.duration_s)
    assert found.output_tokens_per_s == pytest.approx(32 / found.duration_s)
    assert found.total_tokens_per_s == pytest.approx(88 / found.duration_s)


def test_a_request_is_what_was_asked_for() -> None:
    with fake_server(lambda number, asked: stream(0.0, [])) as server:
        load(server, 1, fields={"top_k": 1})
        workload = Written([Ask([{"role": "user", "content": "hi"}], 5, None, {"seed": 2})])
        load(server, 1, chat=True, workload=workload)
    text, chat = server.asked
    assert text.path == "/v1/completions"
    assert text.headers["authorization"] == "Bearer key"
    assert len(text.body.pop("prompt").split()) == 3
    common = {"model": "fake", "stream": True, "stream_options": {"include_usage": True}}
    assert text.body == {**common, "max_tokens": 4, "top_k": 1}
    assert chat.path == "/v1/chat/completions"
    messages = [{"role": "user", "content": "hi"}]
    assert chat.body == {**common, "messages": messages, "max_tokens": 5, "seed": 2}


def test_the_schedule_waits_for_no_answer() -> None:
    def all_came() -> bool:
        return len(server.asked) == 11

    with fake_server(lambda number, asked: stream(all_came, [])) as server:
        found = load(server, 11, rate=20.0, burstiness=math.inf)
    assert found.completed == found.most_open == 11
    assert found.errors == {}
    assert found.lateness_ms and found.lateness_ms.max < SLACK
    assert found.duration_s > 0.49  # the last one leaves half a second after the first


def test_a_bound_holds_requests_back_and_says_how_long() -> None:
    with fake_server(lambda number, asked: stream(0.2, [])) as server:
        found = load(server, 6, max_concurrency=2)
    assert found.most_open == 2
    assert found.slot_wait_ms and found.ttft_ms and found.lateness_ms
    assert 400 <= found.slot_wait_ms.max < 400 + SLACK
    assert found.ttft_ms.p50 >= 200
    assert found.lateness_ms.p50 < found.slot_wait_ms.max
    assert server.connections == 2  # and connections are kept


def test_goodput_counts_those_that_meet_every_objective() -> None:
    def answer(number: int, asked: Asked) -> Script:
        if number == 3:
            return refusal(500, "no")
        return stream(0.4 if number == 0 else 0.0, [0.2 if number == 1 else 0.0])

    with fake_server(answer) as server:
        found = load(server, 5, max_concurrency=1, objectives={"ttft": 300, "tpot": 150})
    assert found.goodput
    assert found.goodput.share == pytest.approx(2 / 5)
    assert found.goodput.requests_per_s == pytest.approx(2 / found.duration_s)


def test_failures_are_counted_by_kind() -> None:
    text = framed(event(text_chunk("x")))
    scripts: list[Script] = [
        refusal(429, "queue is full"),
        refusal(429, "queue is full"),
        [(0.0, HEAD), (0.0, text), (0.0, HANG_UP)],
        [(0.0, HANG_UP)],
        [(0.0, HEAD), (0.0, framed(event({"error": {"message": "engine died"}}))), (0, HANG_UP)],
        [(0.0, HEAD), (0.0, framed(event("{nonsense"))), (0.0, framed(b""))],
        [(0.0, HEAD), (0.0, text), (0.0, framed(b""))],
        [(0.0, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")],
        [(0.0, b"SSH-2.0\r\n\r\n")],
        [(0.0, HEAD), (0.0, text), (5.0, HANG_UP)],
    ]
    with fake_server(lambda number, asked: scripts[number]) as server:
        found = load(server, len(scripts), timeout=1.0, max_concurrency=1)
    assert found.completed == 0
    assert found.ttft_ms is found.e2e_ms is None
    assert found.errors == {
        "HTTP 429": 2,
        "connection closed amid the answer": 1,
        "connection closed": 1,
        "error event": 1,
        "bad answer: an event that isn't a chunk": 1,
        "bad answer: the stream ended early": 1,
        "bad answer: not an event stream": 1,
        "bad answer: not HTTP": 1,
        "timeout": 1,
    }
    assert found.error_examples["HTTP 429"] == "queue is full"
    assert found.error_examples["error event"] == "engine died"
    assert found.error_examples["timeout"] == "after 1 s and 1 chunks"


def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    def answer(number: int, asked: Asked) -> Script:
        return [*stream(0.0, []), (0.3, HANG_UP)]

    with fake_server(answer) as server:
        moments = [Ask("x", 1, at) for at in (0.0, 0.2, 0.7)]
        found = load(server, 3, workload=Written(moments))
    # The second request meets a server that hangs up instead of reading it.
    assert found.errors == {}
    assert found.completed == 3
    assert server.connections == 3


def test_a_server_that_is_gone() -> None:
    with fake_server(lambda number, asked: []) as server:
        pass
    found = load(server, 2)
    assert found.completed == 0
    [(kind, count)] = found.errors.items()
    assert kind.startswith("can't connect")
    assert count == 2
    with pytest.raises(RunError, match=r"warm-up: .*can't connect"):
        load(server, 2, warmup=1)


def test_every_cut_of_an_answer_is_understood() -> None:
    pieces = [data for _, data in stream(0.0, [0.0, 0.0]) if data]
    whole = b"".join(pieces)

    def answer(number: int, asked: Asked) -> Script:
        if number == 0:
            return [(0.001, whole[at : at + 1]) for at in range(len(whole))]
        cut = number * len(whole) // 60
        return [(0.0, whole[:cut]), (0.002, whole[cut:])]

    with fake_server(answer) as server:
        found = load(server, 60, max_concurrency=4)
    assert found.errors == {}
    assert (found.completed, found.output_tokens, found.prompt_tokens) == (60, 180, 420)


def test_an_answer_without_usage_or_length() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    body = event(text_chunk("a")) + event(text_chunk("b")) + event("[DONE]")
    with fake_server(lambda number, asked: [(0.0, head), (0.0, body), (0.0, HANG_UP)]) as server:
        found = load(server, 2)
    assert found.errors == {}
    assert found.uncounted == 2
    assert found.output_tokens == 4


def test_chunks_without_text_are_no_first_token() -> None:
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    tail = event(end) + event(usage_chunk(3, 1)) + event("[DONE]")
    script: Script = [
        (0.0, HEAD),
        (0.0, framed(event(role))),
        (0.2, framed(event(thought))),
        (0.0, framed(tail) + framed(b"")),
    ]
    with fake_server(lambda number, asked: script) as server:
        found = load(server, 1)
    assert found.ttft_ms and 199 <= found.ttft_ms.p50 < 200 + SLACK
    assert found.tokens_per_chunk == 1.0


def test_an_interrupted_run_tells_what_there_is() -> None:
    async def main() -> Summary:
        from ropeway.serving.load.connection import Pool  # noqa: PLC0415
        from ropeway.serving.load.run import Load  # noqa: PLC0415
        from ropeway.serving.load.summary import summarize  # noqa: PLC0415

        target = Target.parse(server.url)
        request = target.request(Ask("x", 1), "fake", chat=False, fields={})
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.5, stop.set)
        pool = Pool(target.host, target.port, tls=False)
        began = time.perf_counter()
        run = await Load(pool, [request] * 4, [0.0, 0.0, 0.1, 60.0]).run(stop)
        assert time.perf_counter() - began < 5
        pool.close()
        return summarize(run, 1.0, {})

    def answer(number: int, asked: Asked) -> Script:
        return stream(0.0 if number == 0 else 30.0, [])

    with fake_server(answer) as server:
        found = asyncio.run(main())
    assert (found.requests, found.completed, found.interrupted) == (3, 1, 2)
    assert found.errors == {}
    assert 0.5 <= found.duration_s < 0.5 + SLACK / 1e3

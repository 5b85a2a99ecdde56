"""`ropeway bench serve` as a process."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command import PROGRAM, ropeway
from support.fake_openai import Asked, FakeServer, Script, fake_server, refusal, stream


def answer(number: int, asked: Asked) -> Script:
    return stream(0.01, [0.005] * (asked.body["max_tokens"] - 1), cached=1)


def test_a_sweep_as_a_table() -> None:
    with fake_server(answer) as server:
        done = ropeway(
            *("bench", "serve", server.url, "--num-prompts", 4, "--request-rate", "50,inf"),
            *("--prompt-tokens", 5, "--output-tokens", 3, "--goodput", "ttft:10000", "--warmup", 1),
        )
    assert done.returncode == 0, done.stderr
    assert "4 of 28 prompt tokens" not in done.stdout  # of which few are worth no remark
    lines = [re.split(r"\s{2,}", line.strip()) for line in done.stdout.splitlines()]
    rows = {name: cells for name, *cells in lines}
    assert rows["request rate"] == ["50", "inf"]
    assert rows["completed"] == ["4 of 4", "4 of 4"]
    assert rows["output tokens"] == ["12", "12"]
    assert float(rows["TTFT, ms, p50"][0]) >= 10
    assert all(cell.endswith(" (100%)") for cell in rows["goodput, requests/s"])
    prompts = [one.body["prompt"] for one in server.asked if one.path == "/v1/completions"]
    assert len(prompts) == 9
    assert len(set(prompts)) == 9  # a warm-up and two rates share none
    assert {one.body["ignore_eos"] for one in server.asked if one.body} == {True}


def test_a_sweep_as_json_with_exact_ids() -> None:
    with fake_server(answer) as server:
        done = ropeway(
            *("bench", "serve", f"{server.url}/v1", "--num-prompts", 3, "--token-ids", "--json"),
            *("--output-tokens", 2, "--no-ignore-eos", "--extra-body", '{"top_k": 3}'),
        )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["url"], told["model"]) == (server.url, "fake")
    [run] = told["runs"]
    assert run["request_rate"] == "inf"
    assert (run["completed"], run["output_tokens"], run["errors"]) == (3, 6, {})
    assert run["ttft_ms"]["p99"] >= run["ttft_ms"]["p50"] >= 10
    bodies = [one.body for one in server.asked if one.path == "/v1/completions"]
    assert {token for body in bodies for token in body["prompt"]} <= {11, 12, 13, 14}
    assert all(len(body["prompt"]) <= 512 and body["top_k"] == 3 for body in bodies)
    assert not any("ignore_eos" in body for body in bodies)


def test_a_file_dictates_the_schedule(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"prompt": "b", "at": 0.4, "max_tokens": 1}, {"prompt": "a", "at": 0, "max_tokens": 2}]
    path.write_text("\n".join(map(json.dumps, lines)))
    with fake_server(answer) as server:
        asked = ("bench", "serve", server.url, "--workload", path)
        done = ropeway(*asked, "--json", "--warmup", 0)
        refused = ropeway(*asked, "--request-rate", 2)
    assert done.returncode == 0, done.stderr
    first, second = (one for one in server.asked if one.path == "/v1/completions")
    assert (first.body["prompt"], second.body["prompt"]) == ("a", "b")
    assert first.at < second.at
    assert refused.returncode == 2
    assert "--request-rate" in refused.stderr


def test_failures_are_told_below_the_table() -> None:
    def fail(number: int, asked: Asked) -> Script:
        if number % 2:
            return stream(0.0, [], prompt=8, cached=6)
        return refusal(429, "the queue is full")

    with fake_server(fail) as server:
        command = ("bench", "serve", server.url, "--num-prompts", 4, "--output-tokens", 1)
        some = ropeway(*command, "--warmup", 0)
        server.answer = lambda number, asked: refusal(404, "no such model")
        none = ropeway(*command, "--warmup", 0)
        warm = ropeway(*command)
    assert some.returncode == 0
    assert "rate inf: 2 failed: HTTP 429: the queue is full" in some.stdout
    assert "rate inf: 12 of 16 prompt tokens were in the server's cache" in some.stdout
    assert none.returncode == 1
    assert "4 failed: HTTP 404: no such model" in none.stdout
    assert warm.returncode == 1
    assert warm.stdout == ""
    assert "warm-up" in warm.stderr
    assert "no such model" in warm.stderr


def test_an_interrupt_prints_what_there_is() -> None:
    def slow(number: int, asked: Asked) -> Script:
        return stream(0.01 if number < 3 else 60.0, [])

    with fake_server(slow) as server:
        process = subprocess.Popen(
            [
                *(str(PROGRAM), "bench", "serve", server.url, "--num-prompts", "5"),
                *("--request-rate", "100", "--warmup", "0", "--json"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        _wait_for(server, 6)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == 130, stderr
    [run] = json.loads(stdout)["runs"]
    assert (run["requests"], run["completed"], run["interrupted"]) == (5, 3, 2)


def _wait_for(server: FakeServer, count: int) -> None:
    """Until so many requests came, /v1/models too, and the first were answered."""
    deadline = time.monotonic() + 30
    while len(server.asked) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["ftp://x"], "no http URL"),
        (["http://x:99999"], "URL"),
        (["--request-rate", "0"], "--request-rate"),
        (["--burstiness", "0"], "--burstiness"),
        (["--goodput", "speed:1"], "--goodput"),
        (["--extra-body", "[]"], "--extra-body"),
        (["--extra-body", "{"], "--extra-body"),
        (["--token-ids", "--chat"], "--token-ids"),
        (["--workload", "missing.jsonl"], "--workload"),
        (["--api-key", "two\nlines"], "--api-key"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], what: str) -> None:
    done = ropeway("bench", "serve", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert what in done.stderr


def test_nobody_listens() -> None:
    with fake_server(answer) as server:
        pass
    done = ropeway("bench", "serve", server.url)
    assert done.returncode == 1
    assert "is the server running?" in done.stderr


def test_load_needs_no_compiler() -> None:
    code = "import sys, ropeway.compiler.cli.bench_serve; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "sympy", "transformers", "rich", "starlette", "uvicorn", "httpx"}
    assert not heavy & set(done.stdout.split())

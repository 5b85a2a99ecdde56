"""A closed-loop client: k threads, each with one streaming request at a time, as many tools do it.

It parses every chunk with the standard library and shares the machine's cores with the server, so
its own cost (about 50 us a chunk) is part of the figure for every server alike.
"""

import http.client
import json
import queue
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from peers.errors import EngineError

LIMIT_S = 600.0


@dataclass(frozen=True)
class Answer:
    """One request's times in seconds, and its tokens."""

    first: float  # from sending to the first token
    per_token: float  # mean time between the tokens after it
    tokens: int


@dataclass(frozen=True)
class Load:
    """What one run of all requests gave."""

    seconds: float
    answers: list[Answer]

    def figures(self) -> dict[str, float]:
        """Output tokens a second, and times in milliseconds."""
        first = [answer.first * 1e3 for answer in self.answers]
        return {
            "tok_s": sum(answer.tokens for answer in self.answers) / self.seconds,
            "ttft_ms_p50": statistics.median(first),
            "ttft_ms_p99": statistics.quantiles(first, n=100, method="inclusive")[98],
            "tpot_ms_p50": statistics.median(answer.per_token * 1e3 for answer in self.answers),
        }


def run(port: int, model: str, prompts: Sequence[list[int]], new: int, clients: int) -> Load:
    """Asks for `new` tokens to each prompt. Raises EngineError when any request failed."""
    waiting: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for prompt in prompts:
        waiting.put(prompt)
    answers: list[Answer] = []
    failures: list[str] = []

    def work() -> None:
        while True:
            try:
                prompt = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                answers.append(_ask(port, model, prompt, new))
            except (OSError, EngineError, http.client.HTTPException, ValueError) as error:
                failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work) for _ in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise EngineError(f"{len(failures)} of {len(prompts)} requests failed: {failures[0]}")
    return Load(time.perf_counter() - began, answers)


def _ask(port: int, model: str, prompt: list[int], new: int) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        began = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise EngineError(f"status {response.status}: {response.read(300)!r}")
        first = last = 0.0
        tokens = 0
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            if chunk.get("choices"):
                last = time.perf_counter()
                first = first or last
    finally:
        connection.close()
    if tokens != new:
        raise EngineError(f"asked for {new} tokens, got {tokens}")
    return Answer(first - began, (last - first) / max(1, new - 1), tokens)

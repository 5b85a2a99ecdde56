"""Thousands of requests of all shapes, some of which go away: nothing is wrong, nothing is left."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import census
from support.offline_answers import Answer, differences, offline_answers, served_answer
from support.server import RunningServer, running_server, wait_until
from support.varied_requests import Varied, varied_requests

from ropeway import LLM

REQUESTS, CONNECTIONS, ABORTS = 2000, 16, 0.1
WARM = 1000  # requests after which a server has taken what it keeps
EVERY = 100  # requests between two looks at memory
# A pool in which the sequences that may run at once don't fit: some are preempted.
POOL = ("--max-num-seqs", "12", "--kv-cache-memory", "320KiB")
GROWTH = 3 << 19  # bytes that a process may grow over all requests: 750 a request is noise
OBJECTS = 400  # Python objects, for what is imported late and queues of fixed length


@dataclass
class Soak:
    """What has happened."""

    server: RunningServer
    engine: int
    done: int = 0
    aborted: int = 0
    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    resident: dict[int, list[float]] = field(default_factory=dict)

    def look(self) -> None:
        """Note what the processes hold, garbage aside: cancelled tasks wait in cycles."""
        for pid in (self.server.pid, self.engine):
            census.objects(self.server, pid)
            self.resident.setdefault(pid, []).append(census.footprint(pid).resident)


async def one(soak: Soak, http: httpx.AsyncClient, asked: Varied, expected: Answer) -> None:
    """Ask and compare."""
    answer = await http.post(asked.path, json=asked.body)
    if answer.status_code != 200:
        soak.faults.append(f"{answer.status_code} {answer.text[:300]} for {asked}")
        return
    try:
        found = served_answer(asked.path, asked.body, answer.content, asked.choices)
    except AssertionError as error:
        soak.faults.append(f"{error} for {asked}")
        return
    wrong = differences(expected, found)
    if wrong:
        soak.faults.append(f"{'; '.join(wrong)[:600]} for {asked}")
    for choice in found.choices:
        soak.counts[f"{choice.finish_reason} {type(choice.stop_reason).__name__}"] += 1


async def soaked(soak: Soak, work: list[tuple[Varied, Answer]]) -> None:
    """All of it, over so many connections."""
    queue = list(enumerate(work))[::-1]
    draw = random.Random(5)
    leaving = {k for k in range(len(work)) if draw.random() < ABORTS}
    patience = {k: draw.uniform(0, 0.06) for k in leaving}
    limits = httpx.Limits(max_connections=CONNECTIONS)

    async def worker() -> None:
        async with httpx.AsyncClient(base_url=soak.server.url, timeout=60, limits=limits) as http:
            while queue:
                k, (asked, expected) = queue.pop()
                try:
                    async with asyncio.timeout(patience.get(k)):
                        await one(soak, http, asked, expected)
                except TimeoutError:
                    soak.aborted += 1
                soak.done += 1
                if soak.done % EVERY == 0:
                    await asyncio.to_thread(soak.look)

    await asyncio.gather(*(worker() for _ in range(CONNECTIONS)))


def engine_now(http: httpx.Client) -> dict[str, Any]:
    """The engine's state and totals."""
    return http.get("/live").json()["engine"]


@pytest.mark.slow
def test_two_thousand_requests(tiny_artifact: Path) -> None:
    requests = varied_requests(REQUESTS, seed=11)
    with LLM(tiny_artifact, num_threads=1, max_num_seqs=64) as llm:
        expected = offline_answers(llm, [(one.path, one.body) for one in requests])
    with running_server(tiny_artifact, *POOL, environment=census.watched()) as server:
        [engine] = server.children()
        soak = Soak(server, engine)
        with server.client() as http:
            asyncio.run(soaked(soak, list(zip(requests, expected, strict=True))[:WARM]))
            engine_now(http)  # its connection stays open
            time.sleep(0.5)
            before = {pid: census.footprint(pid) for pid in (server.pid, engine)}
            living = {pid: census.objects(server, pid) for pid in before}
            soak.done, soak.aborted = 0, 0
            soak.resident.clear()
            began = time.monotonic()
            asyncio.run(soaked(soak, list(zip(requests, expected, strict=True))))
            seconds = time.monotonic() - began
            wait_until(
                lambda: (now := engine_now(http))["running"] + now["waiting"] == 0,
                10,
                f"aborted requests end: {engine_now(http)}",
            )
            time.sleep(0.5)  # for connections to be closed
            state = engine_now(http)
            after = {pid: census.footprint(pid) for pid in (server.pid, engine)}
            left = {pid: census.objects(server, pid) for pid in before}
        growth = {
            "HTTP" if pid == server.pid else "engine": census.slope(values) * len(values)
            for pid, values in soak.resident.items()
        }
        print(
            f"{REQUESTS} requests in {seconds:.1f} s, {soak.aborted} aborted, {soak.counts}, "
            f"{state['preemptions']} preemptions, growth {growth}, {before} {after}, "
            f"objects {[(living[p]['objects'], left[p]['objects']) for p in living]}"
        )
        assert not soak.faults, f"{len(soak.faults)} wrong, first: " + "\n".join(soak.faults[:5])
        assert soak.aborted > REQUESTS * ABORTS / 3
        assert {"length NoneType", "stop str", "stop int", "stop NoneType"} <= set(soak.counts)
        assert state["preemptions"] > 10, "the pool was to be too small"
        assert state["blocks_used"] == 0, f"blocks are lost: {state}"
        assert all(grown < GROWTH for grown in growth.values()), (
            f"memory grows by {growth} bytes: {soak.resident}"
        )
        for pid, was in before.items():
            assert after[pid].descriptors <= was.descriptors, f"{pid}: {was} -> {after[pid]}"
            assert after[pid].threads <= was.threads, f"{pid}: {was} -> {after[pid]}"
        for pid, was_living in living.items():
            more = left[pid]["objects"] - was_living["objects"]
            assert more < OBJECTS, f"process {pid} holds {more} objects more"
            assert left[pid]["tasks"] <= was_living["tasks"], (
                f"tasks are left: {left[pid]['where']}"
            )
        assert server.children() == [engine], "the engine died"
        assert "Traceback" not in server.text()

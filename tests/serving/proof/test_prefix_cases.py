"""What went wrong in other servers with cached prefixes, chunks, preemption and aborts, over HTTP.

The oracle is the same artifact offline, without a prefix cache and with all the memory it wants.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.offline_answers import TEXT, differences, offline_answers, served_answer
from support.server import RunningServer, running_server, wait_until

from ropeway import LLM

CHUNK = 64  # tokens that a step can take
SCORED = {"logprobs": 3, "return_tokens_as_token_ids": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def plain(tiny_artifact: Path) -> Iterator[LLM]:
    """Offline, nothing cached."""
    with LLM(tiny_artifact, num_threads=1, enable_prefix_caching=False) as llm:
        yield llm


def prompt_of(length: int, seed: int) -> list[int]:
    """Token ids that begin like those of no other seed."""
    return [seed % 256, *((seed * 31 + k * k * 7 + k) % 251 for k in range(1, length))]


def asked_of(prompt: list[int], **changes: Any) -> dict[str, Any]:
    """A request that shows much of how it was computed."""
    return {"prompt": prompt, "seed": 8, "max_tokens": 12, "ignore_eos": True, **SCORED, **changes}


def check(plain: LLM, http: httpx.Client, body: dict[str, Any], choices: int = 1) -> int:
    """Ask, compare with the oracle; how many tokens of the prompt were cached."""
    answer = http.post(TEXT, json=body)
    assert answer.status_code == 200, answer.text
    [expected] = offline_answers(plain, [(TEXT, body)])
    assert differences(expected, served_answer(TEXT, body, answer.content, choices)) == []
    if body.get("stream"):
        return -1
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def engine_now(http: httpx.Client) -> dict[str, Any]:
    """The engine's state and totals."""
    return http.get("/live").json()["engine"]


def test_ten_times_the_same(plain: LLM, http: httpx.Client) -> None:
    for length in (5, 100, 400):
        body = asked_of(prompt_of(length, length), n=2)
        cached = [check(plain, http, body, 2) for _ in range(10)]
        assert cached[0] == 0
        assert len(set(cached[1:])) == 1, cached


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_prompts_of_whole_blocks(blocks: int, more: int, plain: LLM, http: httpx.Client) -> None:
    """All whole blocks are hit, but for the last token of the prompt, which must be computed."""
    size = engine_now(http)["block_size"]
    length = blocks * size + more
    body = asked_of(prompt_of(length, 100 + 10 * blocks + more))
    assert check(plain, http, body) == 0
    before = engine_now(http)
    hit = min(length // size * size, length - 1)
    assert check(plain, http, body) == hit
    after = engine_now(http)
    assert after["prefix_hits"] - before["prefix_hits"] == hit
    assert after["prefix_queries"] - before["prefix_queries"] == length


def test_a_last_chunk_of_one_token_is_no_decode(plain: LLM, server: RunningServer) -> None:
    """Two prompts at once, of whole chunks and one token more."""
    bodies = [asked_of(prompt_of(k * CHUNK + 1, 60 + k), temperature=0) for k in (1, 2, 3, 6)]
    expected = offline_answers(plain, [(TEXT, body) for body in bodies])

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            return await asyncio.gather(*(http.post(TEXT, json=body) for body in bodies))

    for body, right, answer in zip(bodies, expected, asyncio.run(ask()), strict=True):
        assert differences(right, served_answer(TEXT, body, answer.content, 1)) == []


async def leave(url: str, body: dict[str, Any], seconds: float) -> None:
    """Ask and go away."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        try:
            async with asyncio.timeout(seconds):
                await http.post(TEXT, json=body)
        except TimeoutError:
            pass


def test_prefixes_of_prompts_that_were_left(
    plain: LLM, server: RunningServer, http: httpx.Client
) -> None:
    """A caller that goes in the middle of its prompt, at any moment, while others share the prefix:
    what it has published is right, and nobody holds it."""
    shared = prompt_of(470, 7)
    own = asked_of([*shared, 1, 2, 3], max_tokens=30, temperature=0)
    others = [asked_of([*shared[:300], *[k] * 9], seed=k) for k in range(6)]
    right = offline_answers(plain, [(TEXT, body) for body in [own, *others]])

    async def round_of(seconds: float) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as many:
            left = [leave(server.url, own, seconds), leave(server.url, own, seconds + 0.004)]
            stay = [many.post(TEXT, json=body) for body in others]
            answers = (await asyncio.gather(*left, *stay))[2:]
            again = await many.post(TEXT, json=own)
        for body, expected, answer in zip([own, *others], right, [again, *answers], strict=True):
            found = served_answer(TEXT, body, answer.content, 1)
            assert differences(expected, found) == [], f"left after {1e3 * seconds:.0f} ms"

    for milliseconds in (1, 3, 5, 8, 11, 15, 19, 25):
        asyncio.run(round_of(milliseconds / 1e3))
        wait_until(lambda: engine_now(http)["blocks_used"] == 0, 5, "blocks come back")


def test_salts_keep_prefixes_apart(plain: LLM, http: httpx.Client) -> None:
    """Tenants neither see nor fill each other's cache, and no other name of a salt collides."""
    prompt = prompt_of(100, 33)
    salts = ["a", "b", "a\n", "", "a b", "ä"]
    for salt in salts:
        body = asked_of(prompt, cache_salt=salt) if salt else asked_of(prompt)
        assert check(plain, http, body) == 0, f"a hit of another's prefix under salt {salt!r}"
        assert check(plain, http, body) == 96


def test_preemption_changes_nothing(plain: LLM, tiny_artifact: Path) -> None:
    """A pool in which all together don't fit by far: the same texts, scores and usage."""
    bodies: list[dict[str, Any]] = []
    for k in range(8):
        body = asked_of(prompt_of(30, 40 + k), max_tokens=200, seed=k, stream=k % 2 == 0)
        body |= {"stream_options": {"include_usage": True}} if body["stream"] else {}
        body |= ({"repetition_penalty": 1.3}, {"frequency_penalty": 0.8}, {}, {"n": 2})[k % 4]
        bodies.append(body)
    expected = offline_answers(plain, [(TEXT, body) for body in bodies])

    async def ask(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            return await asyncio.gather(*(http.post(TEXT, json=body) for body in bodies))

    with (
        running_server(tiny_artifact, "--kv-cache-memory", "448KiB") as server,
        server.client() as http,
    ):
        answers = asyncio.run(ask(server.url))
        state = engine_now(http)
    for body, right, answer in zip(bodies, expected, answers, strict=True):
        assert answer.status_code == 200, answer.text
        found = served_answer(TEXT, body, answer.content, body.get("n", 1))
        assert differences(right, found) == []
    assert state["preemptions"] >= 2 * len(bodies), state
    assert (state["blocks_used"], state["running"], state["waiting"]) == (0, 0, 0)


def test_a_cache_that_is_off_is_off(plain: LLM, tiny_artifact: Path) -> None:
    body = asked_of(prompt_of(100, 3))
    with (
        running_server(tiny_artifact, "--no-enable-prefix-caching") as server,
        server.client() as http,
    ):
        assert [check(plain, http, body) for _ in range(3)] == [0, 0, 0]
        assert engine_now(http)["prefix_hits"] == 0

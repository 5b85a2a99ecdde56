"""What EngineClient refuses, ends early and keeps bounded."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from support import faulty_engine
from support.engine_clients import stats_when, submit, with_client
from support.tiny_checkpoint import byte_prompt

from ropeway.compiler.errors import RequestError
from ropeway.runtime.llm import LLM
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.serving.errors import ApiError
from ropeway.serving.process.client import EngineClient
from ropeway.serving.process.generation import Submission
from ropeway.serving.settings import ServerSettings

PROMPT = byte_prompt(30)
SLOW = [*faulty_engine.SLOW, *PROMPT]  # 20 ms a step from here on


def test_aborts_in_every_state_give_the_blocks_back(tiny_artifact: Path) -> None:
    async def work(client: EngineClient) -> None:
        slow = await submit(client, SLOW, max_tokens=400, ignore_eos=True)
        assert await slow.news()
        waiting = await submit(client, PROMPT, max_tokens=400, n=2)
        await stats_when(client, lambda stats: stats.waiting == 1)
        waiting.abort()
        output = await waiting.output()
        assert [choice.finish_reason for choice in output.outputs] == ["abort", "abort"]
        assert output.outputs[0].token_ids == []

        slow.abort()  # while it decodes
        slow.abort()
        while news := await slow.news():
            last = news
        assert last[-1].finish_reason == "abort"
        assert 0 < len((await slow.output()).outputs[0].token_ids) < 400

        chunked = await submit(client, byte_prompt(400), max_tokens=50)
        async with chunked:  # in the middle of its prompt: 16 tokens a step
            await stats_when(client, lambda stats: stats.blocks_used > 0)
        output = await chunked.output()
        assert output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].token_ids == []
        chunked.abort()  # after its end
        stats = await client.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert client.open_requests == client.open_choices == 0

    options = {"max_num_seqs": 1, "max_num_batched_tokens": 16}
    with_client(tiny_artifact, work, command=faulty_engine.command(), **options)


def test_an_abort_on_the_heels_of_the_submission(tiny_artifact: Path) -> None:
    async def work(client: EngineClient) -> None:
        for turn in range(30):
            async with await submit(client, byte_prompt(100, turn), max_tokens=300, n=2):
                await asyncio.sleep(0.001 * (turn % 5))
        stats = await stats_when(client, lambda stats: stats.running + stats.waiting == 0)
        assert stats.blocks_used == 0
        async with asyncio.timeout(5):
            while client.open_requests:
                await asyncio.sleep(0.01)

    with_client(tiny_artifact, work)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt"),
        ([1, 260], {}, "prompt"),
        ([1, -1], {}, "prompt"),
        ([1, True], {}, "prompt"),
        ([1, 2.0], {}, "prompt"),
        ([5] * 512, {}, "prompt"),
        ([5] * 200, {"max_tokens": 300}, "max_tokens"),
        ([5], {"stop_token_ids": [260]}, "stop_token_ids"),
        ([5], {"logit_bias": {1000: 1}}, "logit_bias"),
        ([5], {"logprobs": 261}, "logprobs"),
    ],
)
def test_what_cannot_be_served_is_refused_as_offline(
    tiny_artifact: Path, prompt: list[int], params: dict[str, object], field: str
) -> None:
    wanted = SamplingParams(**params)  # type: ignore[arg-type]
    memory = 15 << 15  # 448 tokens
    with (
        LLM(tiny_artifact, num_threads=1, kv_cache_memory=memory) as llm,
        pytest.raises(RequestError) as offline,
    ):
        llm.generate([prompt] if prompt else [[]], wanted)

    async def work(client: EngineClient) -> None:
        assert 300 < client.info.capacity_tokens < 490
        with pytest.raises(RequestError) as refused:
            await client.submit([Submission(prompt, wanted)])
        assert str(refused.value) == str(offline.value)
        assert refused.value.field == field
        with pytest.raises(RequestError, match="request 1: ") as refused:
            await client.submit([Submission([5], SamplingParams()), Submission(prompt, wanted)])
        assert refused.value.field == field
        assert client.open_requests == 0
        assert (await client.stats()).prompt_tokens == 0, "nothing of the call may be sent"

    with_client(tiny_artifact, work, kv_cache_memory=memory)


def test_too_many_requests(tiny_artifact: Path) -> None:
    async def work(client: EngineClient) -> None:
        first = await submit(client, SLOW, max_tokens=400, ignore_eos=True, n=2)
        assert await first.news()
        second = await submit(client, PROMPT, n=3)
        with pytest.raises(ApiError, match="5 completions run or wait, and 5 is the most") as full:
            await submit(client, PROMPT)
        assert full.value.status == 429
        assert 1 <= int(full.value.headers["Retry-After"]) <= 60
        second.abort()
        await second.output()
        third = await submit(client, PROMPT, max_tokens=1)
        first.abort()
        await third.output()
        await first.output()
        alone = await submit(client, PROMPT, n=9, max_tokens=2, ignore_eos=True)
        assert len((await alone.output()).outputs) == 9, "what never fits runs alone"

    settings = ServerSettings(max_queued_requests=3)
    command = faulty_engine.command()
    with_client(tiny_artifact, work, settings=settings, command=command, max_num_seqs=2)


def test_a_slow_reader_gets_joined_news(tiny_artifact: Path) -> None:
    async def work(client: EngineClient) -> None:
        generation = await submit(client, PROMPT, max_tokens=400, ignore_eos=True, n=3, logprobs=1)
        most = 0
        while not generation.finished:
            await asyncio.sleep(0.005)
            most = max(most, len(generation._assembly.deltas or ()))
        assert most <= 64
        news = await generation.news()
        output = await generation.output()
        assert sorted(delta.index for delta in news) == [0, 1, 2]
        for delta in news:
            choice = output.outputs[delta.index]
            assert (delta.text, delta.token_ids) == (choice.text, choice.token_ids)
            assert delta.logprobs == choice.logprobs
            assert delta.finish_reason == "length"
        assert await generation.news() == []

    with_client(tiny_artifact, work)


def test_a_drain_takes_nothing_new_and_finishes_the_rest(tiny_artifact: Path) -> None:
    async def work(client: EngineClient) -> None:
        generation = await submit(client, PROMPT, max_tokens=100, ignore_eos=True)
        client.drain()
        assert client.state == "draining"
        assert client.trouble is None
        with pytest.raises(ApiError) as refused:
            await submit(client, PROMPT)
        assert refused.value.status == 503
        assert len((await generation.output()).outputs[0].token_ids) == 100

    with_client(tiny_artifact, work)


def test_the_settings_chat_template_replaces_the_models(tiny_artifact: Path) -> None:
    async def work(client: EngineClient) -> str:
        assert client.tokenizer is not None
        ids = client.tokenizer.encode_chat([{"role": "user", "content": "hi"}])
        return client.tokenizer.decode(ids)

    settings = ServerSettings(chat_template="<{{ messages[0]['content'] }}>")
    assert with_client(tiny_artifact, work, settings=settings) == "<hi>"


def test_what_a_server_imports_first_is_light() -> None:
    code = "import sys, ropeway.serving.process.client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"numpy", "torch", "sympy", "transformers", "starlette", "uvicorn", "jinja2"}
    assert not heavy & set(done.stdout.split())

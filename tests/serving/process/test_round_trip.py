"""What comes through the engine's process is what LLM.generate gives, bit for bit."""

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest
from support.engine_clients import submit, with_client
from support.tiny_checkpoint import byte_prompt

from ropeway.runtime.llm import LLM
from ropeway.runtime.outputs import CompletionDelta, RequestOutput
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.serving.process.client import EngineClient
from ropeway.serving.process.generation import Generation, Submission
from ropeway.serving.settings import ServerSettings

STOPS = list(range(0, 256, 9))
# Each of another kind; the unseeded ones draw from the engine's seed by their turn.
KINDS = [
    SamplingParams(temperature=0, max_tokens=40, logprobs=2),
    SamplingParams(temperature=1.0, seed=3, max_tokens=30, stop_token_ids=STOPS, min_tokens=6),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=25, n=3, logprobs=1),
    SamplingParams(temperature=0.8, top_k=9, max_tokens=33, repetition_penalty=1.3, logprobs=0),
    SamplingParams(temperature=0.7, seed=2**64 - 1, n=2, max_tokens=20, logit_bias={70: 5, 71: -9}),
    SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2),
    SamplingParams(temperature=0, max_tokens=1, top_k=10**30),
    SamplingParams(temperature=1.3, max_tokens=None, min_p=0.02, stop=["e", "zzz"]),
    SamplingParams(max_tokens=10**25, stop_token_ids=STOPS, skip_special_tokens=False),
]
REQUESTS = [
    Submission(
        byte_prompt(1 + 17 * number % 90, number % 5),
        KINDS[number % len(KINDS)],
        prompt_text=f"request {number}",
        priority=number * 5 % 7 // 6 - (number % 11 == 10),
    )
    for number in range(3 * len(KINDS))
]


def offline(artifact: Path, **options: object) -> list[RequestOutput]:
    with LLM(artifact, num_threads=1, **options) as llm:  # type: ignore[arg-type]
        return llm.generate(
            [list(request.prompt_ids) for request in REQUESTS],
            [request.params for request in REQUESTS],
            priority=[request.priority for request in REQUESTS],
        )


def same(found: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for mine, theirs, request in zip(found, wanted, REQUESTS, strict=True):
        assert mine.prompt == request.prompt_text
        assert mine.prompt_token_ids == theirs.prompt_token_ids
        assert mine.prompt_logprobs == theirs.prompt_logprobs
        assert mine.outputs == theirs.outputs


@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_equal_the_offline_ones(tiny_artifact: Path, overlap: bool) -> None:
    async def work(client: EngineClient) -> list[RequestOutput]:
        generations = await client.submit(REQUESTS)
        outputs = [await generation.output() for generation in generations]
        stats = await client.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert client.open_requests == client.open_choices == 0
        return outputs

    options = {"overlap": overlap, "seed": 11, "max_num_seqs": 8}
    same(with_client(tiny_artifact, work, **options), offline(tiny_artifact, **options))


@pytest.mark.parametrize("interval", [None, 0.0, 0.05])
def test_streams_add_up_to_the_output(tiny_artifact: Path, interval: float | None) -> None:
    async def read(generation: Generation) -> list[CompletionDelta]:
        deltas: list[CompletionDelta] = []
        while news := await generation.news():
            assert len({delta.index for delta in news}) == len(news), "one delta a choice"
            deltas += news
        assert await generation.news() == []
        return deltas

    async def work(client: EngineClient) -> list[RequestOutput]:
        generations = await client.submit(REQUESTS, streaming=True)
        streams = await asyncio.gather(*map(read, generations))
        outputs = [await generation.output() for generation in generations]
        for deltas, output in zip(streams, outputs, strict=True):
            by_choice: dict[int, list[CompletionDelta]] = defaultdict(list)
            for delta in deltas:
                by_choice[delta.index].append(delta)
            for choice in output.outputs:
                mine = by_choice[choice.index]
                assert "".join(delta.text for delta in mine) == choice.text
                assert [token for delta in mine for token in delta.token_ids] == choice.token_ids
                logprobs = [entry for delta in mine for entry in delta.logprobs or ()]
                assert logprobs == (choice.logprobs or [])
                assert mine[-1].finish_reason == choice.finish_reason
                assert mine[-1].stop_reason == choice.stop_reason
                assert not any(delta.finish_reason for delta in mine[:-1])
        return outputs

    settings = ServerSettings(stream_interval=interval)
    found = with_client(tiny_artifact, work, settings=settings, seed=11)
    same(found, offline(tiny_artifact, seed=11))


@pytest.mark.parametrize("n", [1, 3])
def test_a_stop_string_over_several_tokens_ends_the_choice_there(
    tiny_artifact: Path, n: int
) -> None:
    prompt = byte_prompt(20, 1)
    with LLM(tiny_artifact, num_threads=1) as llm:
        full = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=40))[0].outputs[0]
    stop = full.text[7:10]

    async def work(client: EngineClient) -> None:
        generation = await submit(client, prompt, max_tokens=400, ignore_eos=True, stop=stop, n=n)
        output = await generation.output()
        for choice in output.outputs:
            assert choice.text == full.text[: full.text.index(stop)]
            assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        stats = await client.stats()
        assert stats.blocks_used == stats.running == 0
        assert stats.output_tokens < 60 * n, "the engine went on"

    with_client(tiny_artifact, work)


def test_cached_tokens_and_records(tiny_artifact: Path) -> None:
    async def work(client: EngineClient) -> None:
        records = []
        client.on_request_end.append(records.append)
        prompt = byte_prompt(100)
        for _ in range(2):
            generation = await submit(client, prompt, max_tokens=5, n=2, ignore_eos=True)
            await generation.output()
        block = client.info.block_size
        assert generation.cached_tokens == 99 // block * block
        first, second = records
        assert (first.cached_tokens, second.cached_tokens) == (0, generation.cached_tokens)
        assert second.prompt_tokens == 100
        assert [len(times) for times in second.token_times] == [5, 5]
        assert second.output_tokens == 10
        assert second.finish_reasons == ["length", "length"]
        moments = [second.arrival, second.first_token, *second.token_times[0][1:], second.ended]
        assert moments == sorted(moments)

    with_client(tiny_artifact, work)

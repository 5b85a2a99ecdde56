"""Grammars are compiled beside the steps: refused before anything runs, aborted while they wait."""

import asyncio
import threading
from pathlib import Path

import pytest
from support.engine_clients import submit, with_client
from support.tiny_checkpoint import byte_prompt

from ropeway.compiler.errors import RequestError
from ropeway.runtime.engine.messages import GenerationRequest
from ropeway.runtime.llm import LLM
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.runtime.sampling.structured import StructuredOutputs
from ropeway.serving.process.client import EngineClient
from ropeway.serving.process.generation import Generation, Submission
from ropeway.serving.process.preparation import Preparation
from ropeway.serving.process.protocol import Add

PROMPT = byte_prompt(20)
FORMS = [
    StructuredOutputs(regex="[0-9]{3}-[a-f]{2,9}"),
    StructuredOutputs(choice=["yes", "no", "perhaps"]),
    StructuredOutputs(json={"type": "object", "properties": {"a": {"enum": [1, 2]}}}),
    StructuredOutputs(grammar='start: "x" ("y" | "z")+ "."'),
]
BAD = StructuredOutputs(regex="[")


def add(request_id: str, form: StructuredOutputs = BAD) -> Add:
    params = SamplingParams(structured_outputs=form)
    return Add(GenerationRequest(request_id=request_id, prompt=(1,), params=params))


def test_constrained_answers_equal_the_offline_ones(tiny_artifact: Path) -> None:
    params = [
        SamplingParams(temperature=temperature, seed=7, max_tokens=40, n=2, structured_outputs=form)
        for form in FORMS
        for temperature in (0, 1.0)
    ]
    with LLM(tiny_artifact, num_threads=1) as llm:
        wanted = llm.generate([PROMPT] * len(params), params)

    async def work(client: EngineClient) -> None:
        # A neighbour in the same call, which needs no grammar.
        free = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        generations = await client.submit([Submission(PROMPT, one) for one in [free, *params]])
        outputs = [await generation.output() for generation in generations]
        assert [output.outputs for output in outputs[1:]] == [output.outputs for output in wanted]
        assert outputs[3].outputs[0].text in ("yes", "no", "perhaps")

    with_client(tiny_artifact, work)


def test_a_grammar_that_cannot_be_compiled_is_refused(tiny_artifact: Path) -> None:
    async def work(client: EngineClient) -> None:
        records: list[object] = []
        client.on_request_end.append(records.append)
        with pytest.raises(RequestError) as refused:
            await submit(client, PROMPT, structured_outputs=BAD)
        assert refused.value.field == "structured_outputs.regex"
        assert client.open_requests == client.open_choices == 0
        assert records == [], "it never began"
        good = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        bad = SamplingParams(structured_outputs=BAD)
        with pytest.raises(RequestError, match="request 1: ") as refused:
            await client.submit([Submission(PROMPT, good), Submission(PROMPT, bad)])
        assert refused.value.field == "structured_outputs.regex"
        async with asyncio.timeout(5):
            while client.open_requests:
                await asyncio.sleep(0.01)
        assert (await client.stats()).blocks_used == 0
        lone = StructuredOutputs(choice=["\ud800"])
        with pytest.raises(RequestError) as refused:
            await submit(client, PROMPT, structured_outputs=lone)
        assert refused.value.field.startswith("structured_outputs")

    with_client(tiny_artifact, work)


def test_a_caller_that_leaves_while_a_grammar_is_compiled(tiny_artifact: Path) -> None:
    form = StructuredOutputs(json={"type": "object"})

    async def work(client: EngineClient) -> None:
        for pause in (0.0, 0.001, 0.01, 0.1):
            task = asyncio.create_task(
                submit(client, PROMPT, structured_outputs=form, max_tokens=400)
            )
            await asyncio.sleep(pause)
            task.cancel()
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            if isinstance(result, Generation):
                result.abort()
            async with asyncio.timeout(5):
                while client.open_requests:
                    await asyncio.sleep(0.01)
        stats = await client.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)

    with_client(tiny_artifact, work)


def test_what_was_cancelled_does_not_come_out() -> None:
    go = threading.Event()

    def work(params: SamplingParams) -> str:
        assert go.wait(5)
        assert params.structured_outputs is not None
        if params.structured_outputs == BAD:
            raise RequestError("structured_outputs.regex", "bad")
        if params.structured_outputs == FORMS[1]:
            raise ZeroDivisionError("of the compiler's own")
        return params.structured_outputs.kind

    preparation = Preparation(work)
    for name, form in zip("abcd", (FORMS[0], BAD, FORMS[1], FORMS[2]), strict=True):
        preparation.start(add(name, form))
    assert list(preparation.take()) == []
    assert preparation.cancel("d")
    assert not preparation.cancel("d")
    go.set()
    results = {}
    while len(results) < 3:
        results.update((m.request.request_id, result) for m, result in preparation.take())
    assert results["a"] == "regex"
    assert str(results["b"]) == "structured_outputs.regex: bad"
    assert "ZeroDivisionError: of the compiler's own" in str(results["c"])
    assert list(preparation.take()) == []
    assert not preparation.cancel("a")
    preparation.close()

"""A real server through OpenAI's own client, against an offline LLM of the same artifact."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.chunk_grammar import read_stream
from support.server import RunningServer

from ropeway import LLM, SamplingParams

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüß dich, 世界 🙂!"},
]


@pytest.fixture(scope="module")
def offline(tiny_artifact: Path) -> Iterator[LLM]:
    """The artifact that the server serves."""
    with LLM(tiny_artifact, num_threads=1) as llm:
        yield llm


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client, which retries nothing."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    """The name that the server gives its model."""
    return client.models.list().data[0].id


def test_completion(client: openai.OpenAI, model: str, offline: LLM) -> None:
    params = SamplingParams(max_tokens=24, seed=3, n=2, temperature=1.3)
    [expected] = offline.generate("naïve ", params)
    fields: dict[str, Any] = {"max_tokens": 24, "seed": 3, "n": 2, "temperature": 1.3}
    answer = client.completions.create(model=model, prompt="naïve ", **fields)
    assert [c.text for c in answer.choices] == [o.text for o in expected.outputs]
    assert [c.finish_reason for c in answer.choices] == [o.finish_reason for o in expected.outputs]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(o.token_ids) for o in expected.outputs)
    texts = ["", ""]
    usage = None
    for chunk in client.completions.create(
        model=model,
        prompt="naïve ",
        stream=True,
        stream_options={"include_usage": True},
        **fields,
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [o.text for o in expected.outputs]
    assert usage is not None
    assert usage.completion_tokens == answer.usage.completion_tokens


def test_logprobs_of_a_real_model(client: openai.OpenAI, model: str, offline: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=3, prompt_logprobs=3)
    [expected] = offline.generate([104, 105, 32], params)
    answer = client.completions.create(
        model=model, prompt=[104, 105, 32], max_tokens=8, temperature=0, logprobs=3, echo=True
    )
    made = answer.choices[0].logprobs
    assert made is not None and made.token_logprobs is not None
    assert expected.prompt_logprobs is not None and expected.outputs[0].logprobs is not None
    entries = [*expected.prompt_logprobs, *expected.outputs[0].logprobs]
    ids = [104, 105, 32, *expected.outputs[0].token_ids]
    assert made.token_logprobs == [
        entry and entry[token].logprob for entry, token in zip(entries, ids, strict=True)
    ]
    echoed = offline.tokenizer.decode([104, 105, 32])
    assert answer.choices[0].text == echoed + expected.outputs[0].text


def test_chat(client: openai.OpenAI, model: str, offline: LLM) -> None:
    [expected] = offline.chat(MESSAGES, SamplingParams(max_tokens=24, seed=1))
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=24, seed=1
    )
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    text = expected.outputs[0].text
    stop = text[6:8]  # the client's helper refuses an answer that was cut by its length
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, max_completion_tokens=24, seed=1, stop=stop
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text[: text.index(stop)]
    assert final.choices[0].finish_reason == "stop"


def test_many_at_once_each_get_their_own(server: RunningServer, model: str, offline: LLM) -> None:
    prompts = [f"prompt number {k}: " for k in range(24)]
    params = [SamplingParams(max_tokens=10 + k, seed=k) for k in range(24)]
    expected = [o.outputs[0].text for o in offline.generate(prompts, params)]

    async def ask(client: openai.AsyncOpenAI, k: int) -> str:
        fields: dict[str, Any] = {"model": model, "prompt": prompts[k], "seed": k}
        if k % 2:
            whole = await client.completions.create(max_tokens=10 + k, **fields)
            return whole.choices[0].text
        stream = await client.completions.create(max_tokens=10 + k, stream=True, **fields)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return list(await asyncio.gather(*(ask(client, k) for k in range(24))))

    assert asyncio.run(ask_all()) == expected


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, prompt="")
    assert refused.value.param == "prompt"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=model, messages=MESSAGES, max_completion_tokens=600)
    assert long.value.code == "context_length_exceeded"


@pytest.mark.parametrize("chat", [False, True])
def test_grammar_on_the_wire(chat: bool, server: RunningServer, model: str) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    own: dict[str, Any] = {"messages": MESSAGES} if chat else {"prompt": ["ab", "cd"]}
    n = 3 if chat else 6
    fields = {"model": model, "n": 3, "max_tokens": 30, "seed": 5, "logprobs": True if chat else 2}
    with server.client() as http:
        whole = http.post(path, json={**own, **fields}).json()
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        answer = http.post(path, json={**own, **fields, **stream})
    read = read_stream(answer.content, chat=chat, n=n, include_usage=True)
    for choice in whole["choices"]:
        text = choice["message"]["content"] if chat else choice["text"]
        assert read.choices[choice["index"]].text == text
    assert read.usage is not None
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert read.usage[name] == whole["usage"][name]

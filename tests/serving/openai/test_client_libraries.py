"""The libraries that people put on top of OpenAI's client run their common calls."""

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pydantic
import pytest
from support.server import RunningServer, running_server
from support.tiny_checkpoint import make_checkpoint

import ropeway

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would look for one on the net


class Person(pydantic.BaseModel):
    """What a structured answer holds."""

    name: str = pydantic.Field(max_length=6)
    age: int = pydantic.Field(ge=0, le=99)


class Anything(pydantic.BaseModel, extra="allow"):
    """Any JSON object."""


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose model, with a token a byte, has room for what these libraries write."""
    folder = tmp_path_factory.mktemp("roomy")
    make_checkpoint(folder / "tiny", max_position_embeddings=4096)
    ropeway.compile(folder / "tiny", dtype="float32", max_num_batched_tokens=64).save(
        folder / "tiny.rope"
    )
    with running_server(folder / "tiny.rope") as running:
        yield running


@pytest.fixture
def address(roomy: RunningServer) -> str:
    """The base URL that such clients take."""
    return f"{roomy.url}/v1"


@pytest.fixture
def http(roomy: RunningServer) -> Iterator[httpx.Client]:
    """A client without a library."""
    with roomy.client() as client:
        yield client


@pytest.fixture
def expected(http: httpx.Client) -> str:
    """The greedy answer to "Who?"."""
    body = {"messages": [{"role": "user", "content": "Who?"}], "temperature": 0, "max_tokens": 12}
    answer = http.post("/v1/chat/completions", json=body).json()
    return str(answer["choices"][0]["message"]["content"])


class TestLangChain:
    """langchain-openai's ChatOpenAI and OpenAI."""

    @pytest.fixture
    def model(self, address: str) -> Any:
        """A chat model."""
        from langchain_openai import ChatOpenAI  # noqa: PLC0415  (slow to import)

        fields: dict[str, Any] = {"model": "tiny", "base_url": address, "api_key": "none"}
        return ChatOpenAI(temperature=0, max_tokens=12, max_retries=0, **fields)

    def test_invoke_stream_and_batch(self, model: Any, expected: str) -> None:
        answer = model.invoke("Who?")
        assert answer.content == expected
        assert answer.usage_metadata["output_tokens"] > 0
        assert "".join(chunk.content for chunk in model.stream("Who?")) == expected
        assert [one.content for one in model.batch(["Who?", "Who?"])] == [expected] * 2
        assert asyncio.run(model.ainvoke("Who?")).content == expected

    def test_structured_output(self, model: Any) -> None:
        wide = model.model_copy(update={"max_tokens": 300})
        for method in ("json_schema", "function_calling"):
            made = wide.with_structured_output(Person, method=method).invoke("Who?")
            assert isinstance(made, Person)

    def test_completions(self, address: str, http: httpx.Client) -> None:
        from langchain_openai import OpenAI  # noqa: PLC0415  (slow to import)

        fields: dict[str, Any] = {"model": "tiny", "base_url": address, "api_key": "none"}
        model = OpenAI(temperature=0, max_tokens=8, max_retries=0, **fields)
        body = {"prompt": "Who?", "temperature": 0, "max_tokens": 8}
        whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert model.invoke("Who?") == whole
        assert "".join(model.stream("Who?")) == whole


class TestLiteLLM:
    """litellm's completion, by its way for servers that speak OpenAI's protocol."""

    @pytest.fixture
    def fields(self, address: str) -> dict[str, Any]:
        """What every call takes."""
        return {
            "model": "openai/tiny",
            "api_base": address,
            "api_key": "none",
            "messages": [{"role": "user", "content": "Who?"}],
            "temperature": 0,
            "max_tokens": 12,
        }

    def test_whole_and_streamed(self, fields: dict[str, Any], expected: str) -> None:
        import litellm  # noqa: PLC0415  (slow to import)

        answer = litellm.completion(**fields)
        assert answer.choices[0].message.content == expected
        chunks = list(litellm.completion(**fields, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected

        async def ask() -> str:
            answer = await litellm.acompletion(**fields)
            return str(answer.choices[0].message.content)

        assert asyncio.run(ask()) == expected

    def test_its_errors(self, fields: dict[str, Any]) -> None:
        import litellm  # noqa: PLC0415  (slow to import)

        with pytest.raises(litellm.exceptions.BadRequestError) as refused:
            litellm.completion(**fields | {"temperature": 0, "top_p": 7}, num_retries=0)
        assert "top_p" in str(refused.value)
        with pytest.raises(litellm.exceptions.ContextWindowExceededError):
            litellm.completion(**fields | {"max_tokens": 5000}, num_retries=0)


@pytest.mark.parametrize("mode", ["JSON", "JSON_SCHEMA", "TOOLS"])
def test_instructor(mode: str, address: str) -> None:
    import instructor  # noqa: PLC0415  (slow to import)
    import openai  # noqa: PLC0415

    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        patched = instructor.from_openai(client, mode=instructor.Mode[mode])
        fields: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "max_retries": 0}
        messages: Any = [{"role": "user", "content": "Who?"}]
        # In this mode any JSON object will do for the server, and a random model writes any.
        fields["response_model"] = Anything if mode == "JSON" else Person
        made = patched.chat.completions.create(messages=messages, **fields)
        assert isinstance(made, fields["response_model"])

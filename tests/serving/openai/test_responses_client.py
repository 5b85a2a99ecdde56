"""/v1/responses and tools of a real server through OpenAI's own client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from support.server import RunningServer, running_server
from support.tiny_checkpoint import make_checkpoint

import ropeway

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
CHAT_TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": CITY, "strict": True},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model with room for what it is told of tools: a token is a byte."""
    folder = make_checkpoint(
        tmp_path_factory.mktemp("long") / "checkpoint", max_position_embeddings=2048
    )
    path = folder.parent / "long.rope"
    ropeway.compile(folder, dtype="float32", max_num_batched_tokens=256).save(path)
    with running_server(path) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client, which retries nothing."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def fields(client: openai.OpenAI) -> dict[str, Any]:
    """What all requests have."""
    model = client.models.list().data[0].id
    return {"model": model, "temperature": 0, "input": "Rain in Rome?"}


def test_a_text_whole_and_streamed(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    answer = client.responses.create(**fields, max_output_tokens=24)
    assert answer.output_text
    assert answer.usage is not None
    assert answer.usage.output_tokens <= 24
    texts, last = "", None
    for event in client.responses.create(**fields, max_output_tokens=24, stream=True):
        last = event
        if event.type == "response.output_text.delta":
            texts += event.delta
    assert texts == answer.output_text
    assert last is not None
    assert last.type == f"response.{answer.status}"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_that_is_insisted_on(
    client: openai.OpenAI, fields: dict[str, Any], choice: Any
) -> None:
    asked: dict[str, Any] = {
        **fields,
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    answer = client.responses.create(**asked)
    [call] = answer.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    assert answer.status == "completed"
    with client.responses.stream(**asked) as stream:
        deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == call.arguments
    assert deltas
    [again] = final.output
    assert again.type == "function_call"
    assert again.arguments == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
    history: Any = [{"role": "user", "content": fields["input"]}, call.to_dict(), result]
    more = {**fields, "input": history, "max_output_tokens": 8}
    assert client.responses.create(**more, tools=[TOOL]).output


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_chats_call_that_is_insisted_on(
    client: openai.OpenAI, fields: dict[str, Any], choice: Any
) -> None:
    asked: dict[str, Any] = {
        "model": fields["model"],
        "temperature": 0,
        "messages": [{"role": "user", "content": "Rain?"}],
        "tools": [CHAT_TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    [choice] = client.chat.completions.create(**asked).choices
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    with client.chat.completions.stream(**asked) as stream:
        arguments = [e.arguments_delta for e in stream if e.type.endswith("arguments.delta")]
        [final] = stream.get_final_completion().choices
    assert "".join(arguments) == call.function.arguments
    assert final.finish_reason == choice.finish_reason == "tool_calls"


class Rain(pydantic.BaseModel):
    """A form of an answer."""

    city: str = pydantic.Field(pattern="^(Rome|Oslo)$")
    wet: bool


def test_a_form_that_the_client_parses(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    answer = client.responses.parse(**fields, text_format=Rain)
    assert answer.output_parsed is not None
    assert answer.output_parsed.city in ("Rome", "Oslo")
    with client.responses.stream(**fields, text_format=Rain) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == answer.output_parsed


def test_errors_are_those_that_the_client_knows(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**fields, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**{**fields, "model": "other"})
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    bad = {**TOOL, "parameters": {**CITY, "properties": {"city": {"$ref": "#/nowhere"}}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**fields, tools=[bad], tool_choice="required", stream=stream)
        assert caught.value.param == "tools"

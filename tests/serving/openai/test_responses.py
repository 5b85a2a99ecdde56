"""/v1/responses against chats, and its streams against its answers."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from openai.types.responses import Response
from support.response_grammar import read_events, read_response
from support.tiny_tokenizers import byte_level
from support.toy_server import ToyServer, scripted_server, toy_http

from ropeway.serving.openai.responses import ENDPOINTS
from ropeway.serving.openai.responses_fields import ResponsesRequest
from ropeway.serving.openai.responses_lower import lower

MakeToy = Callable[..., ToyServer]
PATH = "/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Looks out.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}
CALLS = (
    "Let me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


def post(server: ToyServer, body: dict[str, Any]) -> httpx.Response:
    """The answer of the endpoint."""

    async def ask() -> httpx.Response:
        async with toy_http(server.client, ENDPOINTS, **server._settings) as http:
            return await http.post(PATH, json=body)

    return asyncio.run(ask())


def whole(server: ToyServer, **body: Any) -> dict[str, Any]:
    """A whole response, which fits the client's schema."""
    answer = post(server, body)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json(), strict=False)
    return dict(answer.json())


def streamed(server: ToyServer, **body: Any) -> dict[str, Any]:
    """A streamed one; the grammar is checked."""
    answer = post(server, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return read_response(answer.content)


def refused(server: ToyServer, **body: Any) -> dict[str, Any]:
    """The error object of a request that must be refused with 400."""
    answer = post(server, {"input": "hi", **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def lasting(value: Any) -> Any:
    """Without ids and moments, which no two answers share."""
    if isinstance(value, list):
        return [lasting(one) for one in value]
    if not isinstance(value, dict):
        return value
    changing = ("id", "call_id", "created_at", "completed_at")
    return {name: lasting(one) for name, one in value.items() if name not in changing}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_output_tokens": 5, "temperature": 0},
        {"instructions": "be brief", "max_output_tokens": 7},
        {"top_p": 0.5, "top_k": 4, "max_output_tokens": 9, "stop": ["a"]},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 4},
    ],
    ids=lambda fields: "+".join(fields) or "defaults",
)
def test_the_text_is_the_chats_and_the_stream_the_answer(
    fields: dict[str, Any], toy: MakeToy
) -> None:
    fields = {"seed": 3, "input": "hi", **fields}
    messages = [{"role": "user", "content": "hi"}]
    if "instructions" in fields:
        messages.insert(0, {"role": "system", "content": fields["instructions"]})
    kept = {
        k: v for k, v in fields.items() if k in ("temperature", "top_p", "top_k", "stop", "seed")
    }
    if "max_output_tokens" in fields:
        kept["max_completion_tokens"] = fields["max_output_tokens"]
    if "include" in fields:
        kept |= {"logprobs": True, "top_logprobs": 2}
    chat = toy().whole("/chat/completions", messages=messages, **kept)
    [choice] = chat["choices"]
    answer = whole(toy(), **fields)
    [item] = answer["output"]
    [part] = item["content"]
    assert part["text"] == choice["message"]["content"]
    assert (
        answer["status"] == {"stop": "completed", "length": "incomplete"}[choice["finish_reason"]]
    )
    if "include" in fields:
        assert part["logprobs"] == choice["logprobs"]["content"]
    usage = chat["usage"]
    assert answer["usage"]["input_tokens"] == usage["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == usage["completion_tokens"]
    assert answer["usage"]["total_tokens"] == usage["total_tokens"]
    for steps in (1, 3, 50):
        assert lasting(streamed(toy(steps=steps), **fields)) == lasting(answer)


def test_an_answer_that_is_too_long_says_so(toy: MakeToy) -> None:
    answer = whole(toy(), input="hi", max_output_tokens=3, seed=1)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["completed_at"] is None
    assert answer["output"][-1]["status"] == "incomplete"


@pytest.mark.parametrize("steps", [1, 4, 400])
def test_calls_are_items_of_their_own(steps: int) -> None:
    server = scripted_server(CALLS, steps=steps)
    fields: dict[str, Any] = {"input": "Rain?", "tools": [WEATHER]}
    answer = whole(server, **fields)
    message, *calls = answer["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert [(call["type"], call["name"], call["arguments"]) for call in calls] == [
        ("function_call", "weather", '{"city": "Rome"}'),
        ("function_call", "weather", '{"city": "Oslo"}'),
    ]
    assert len({call["call_id"] for call in calls}) == 2
    assert answer["status"] == "completed"
    assert lasting(streamed(server, **fields)) == lasting(answer)


def test_arguments_are_streamed_while_they_come() -> None:
    answer = post(scripted_server(CALLS), {"input": "Rain?", "tools": [WEATHER], "stream": True})
    kinds = [event["type"] for event in read_events(answer.content)]
    assert kinds.count("response.function_call_arguments.delta") > 6


@pytest.mark.parametrize("steps", [1, 400])
def test_thinking_is_an_item(steps: int) -> None:
    server = scripted_server(
        "<think>\nHm, so.\n</think>\n\nYes.", steps=steps, reasoning_parser="think"
    )
    answer = whole(server, input="?")
    thoughts, message = answer["output"]
    assert thoughts["type"] == "reasoning"
    assert thoughts["summary"] == []
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Hm, so."}]
    assert message["content"][0]["text"] == "Yes."
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == len(
        server.client.tokenizer.encode("Hm, so.")  # type: ignore[union-attr]
    )
    assert lasting(streamed(server, input="?")) == lasting(answer)


def test_markers_that_are_special_tokens_are_seen_and_not_shown() -> None:
    tokenizer = byte_level(special=("[TOOL_CALLS]", "[ARGS]"))
    text = 'Well.[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'
    server = scripted_server(text, tokenizer=tokenizer, tool_call_parser="mistral")
    answer = whole(server, input="?", tools=[WEATHER])
    message, call = answer["output"]
    assert message["content"][0]["text"] == "Well."
    assert (call["name"], call["arguments"]) == ("weather", '{"city": "Rome"}')
    assert re.fullmatch(r"[a-zA-Z0-9]{9}", call["call_id"])
    assert lasting(streamed(server, input="?", tools=[WEATHER])) == lasting(answer)
    [plain] = whole(server, input="?")["output"]  # nobody looks for calls: special tokens stay away
    assert plain["content"][0]["text"] == 'Well.weather{"city": "Rome"}'


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    server = scripted_server("")
    answer = whole(server, input="?")
    assert [item["content"][0]["text"] for item in answer["output"]] == [""]
    assert lasting(streamed(server, input="?")) == lasting(answer)


def test_a_conversation_as_items_is_the_chat_of_its_messages() -> None:
    server = scripted_server("ok")
    call = {
        "type": "function_call",
        "call_id": "c1",
        "name": "weather",
        "arguments": '{"city":"Rome"}',
    }
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "Rain?"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        call,
        {**call, "call_id": "c2", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "dry"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "wet"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "So?"}]},
    ]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "Let me see.",
            "tool_calls": [
                {
                    "id": one,
                    "type": "function",
                    "function": {"name": "weather", "arguments": arguments},
                }
                for one, arguments in (("c1", '{"city":"Rome"}'), ("c2", "{}"))
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "dry"},
        {"role": "tool", "tool_call_id": "c2", "content": "wet"},
        {"role": "user", "content": "So?"},
    ]
    function = {k: v for k, v in WEATHER.items() if k != "type"}
    tools = [{"type": "function", "function": function}]
    chat = server.whole("/chat/completions", messages=messages, tools=tools, return_token_ids=True)
    whole(server, input=items, instructions="Be brief.", tools=[WEATHER])
    prompt = server.client.generations[-1].prompt_ids
    assert list(prompt) == chat["prompt_token_ids"]


def test_what_a_response_says_can_be_sent_back() -> None:
    server = scripted_server(f"<think>Hm.</think>{CALLS}", reasoning_parser="think")
    first: Any = {"role": "user", "content": "Rain?"}
    answer = whole(server, input=[first], tools=[WEATHER])
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "dry"}
        for call in calls
    ]
    again = whole(server, input=[first, *answer["output"], *results], tools=[WEATHER])
    assert again["status"] == "completed"
    tokenizer = server.client.tokenizer
    assert tokenizer is not None
    text = tokenizer.decode(server.client.generations[-1].prompt_ids)
    assert text.count('{"name": "weather", "arguments": {"city": "Rome"}}') == 1
    assert text.count("<tool_response>\ndry\n</tool_response>") == 2


def test_what_was_asked_comes_back() -> None:
    asked = {
        "instructions": "Be brief.",
        "max_output_tokens": 99,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.9,
        "tools": [WEATHER],
        "tool_choice": "auto",
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    answer = whole(scripted_server("ok"), input="?", store=True, **asked)
    assert {name: answer[name] for name in asked if name != "tools"} == {
        name: value for name, value in asked.items() if name != "tools"
    }
    assert answer["tools"][0]["name"] == "weather"
    assert answer["store"] is False
    assert answer["text"]["format"] == {"type": "text"}


def test_an_engine_that_fails_in_the_middle_ends_the_stream_so(toy: MakeToy) -> None:
    server = toy(fail_after=6)
    answer = post(server, {"input": "hi", "seed": 1, "stream": True, "ignore_eos": True})
    response = read_response(answer.content)
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "the engine is gone"}
    assert response["output"][0]["status"] == "incomplete"


def test_an_engine_that_fails_at_once_is_a_status(toy: MakeToy) -> None:
    server = toy(fail_after=0)
    assert post(server, {"input": "hi", "stream": True}).status_code == 500
    assert post(toy(fail_after=0), {"input": "hi"}).status_code == 500


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True},
            {
                "type": "json_schema",
                "json_schema": {
                    "name": "n",
                    "schema": {"type": "object"},
                    "strict": True,
                    "description": None,
                },
            },
        ),
    ],
)
def test_a_form_is_the_chats_form(form: dict[str, Any], expected: Any) -> None:
    request = msgspec.convert({"input": "?", "text": {"format": form}}, ResponsesRequest)
    assert msgspec.to_builtins(lower(request).request.response_format) == expected

"""Every field of OpenAI's published schema is taken, or refused by name."""

import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types.responses import response_create_params as published
from openai.types.responses.response_includable import ResponseIncludable
from openai.types.responses.response_input_param import ResponseInputItemParam
from openai.types.responses.tool_param import ToolParam
from support.toy_server import ToyServer

from ropeway.serving.openai import responses_fields as fields

from .test_responses import refused, whole

MakeToy = Callable[..., ToyServer]
EXAMPLES: dict[str, Any] = {
    "background": False,
    "context_management": [{"type": "compaction"}],
    "include": ["reasoning.encrypted_content", "file_search_call.results"],
    "instructions": "i",
    "max_output_tokens": 2,
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "model": "toy",
    "parallel_tool_calls": True,
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low", "summary": "auto", "context": "auto", "mode": "standard"},
    "safety_identifier": "s",
    "service_tier": "flex",
    "store": True,
    "stream": False,
    "stream_options": {"include_obfuscation": False},
    "temperature": 1,
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1,
    "truncation": "auto",
    "user": "u",
}
SCHEMA = set(typing.get_type_hints(published.ResponseCreateParamsBase)) | {"stream"}
MINE = {one.encode_name for one in msgspec.structs.fields(fields.ResponsesRequest)}


def test_no_field_is_missing() -> None:
    assert SCHEMA <= MINE
    assert {"input", *EXAMPLES, *fields.REFUSED} == SCHEMA


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_a_field_is_taken(name: str, toy: MakeToy) -> None:
    given = {"max_output_tokens": 2, "seed": 1, name: EXAMPLES[name]}
    answer = whole(toy(), input="hi", **given)
    if name in {entry.partition(".")[0] for entry in fields.NO_MEANING}:
        plain = whole(toy(), input="hi", max_output_tokens=2, seed=1)
        assert answer["output"][0]["content"] == plain["output"][0]["content"]
    assert whole(toy(), input="hi", **{**given, name: None})["object"] == "response"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("background", True),
        ("conversation", "conv_1"),
        ("conversation", {"id": "conv_1"}),
        ("moderation", {"model": "m"}),
        ("previous_response_id", "resp_1"),
        ("prompt", {"id": "p"}),
    ],
)
def test_a_field_is_refused_by_name(name: str, value: Any, toy: MakeToy) -> None:
    error = refused(toy(), **{name: value})
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter"
    assert error["message"].startswith(f"{name}: ")


def _types_of(union: Any) -> set[str]:
    """What `type` may be, over the members of a union of typed dicts."""
    found: set[str] = set()
    waiting = [typing.get_type_hints(member).get("type") for member in typing.get_args(union)]
    while waiting:
        hint = waiting.pop()
        if isinstance(hint, str):
            found.add(hint)
        waiting += typing.get_args(hint)
    return found


def test_every_kind_of_item_and_tool_is_served_or_refused_by_name() -> None:
    served = {"message", "function_call", "function_call_output", "reasoning"}
    assert _types_of(ResponseInputItemParam) == served | fields.OTHER_ITEMS
    assert _types_of(ToolParam) <= {"function"} | fields.OTHER_TOOLS
    assert set(typing.get_args(ResponseIncludable)) == set(typing.get_args(fields.Includable))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0].type"),
        ({"input": [{"type": "nonsense"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user", "content": "x", "contnt": 1}]}, "input[0].contnt"),
        (
            {
                "input": [
                    {"role": "user", "content": "x"},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "["},
                ]
            },
            "input[1].arguments",
        ),
        ({"instrctions": "x"}, "instrctions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["nonsense"]}, "include[0]"),
        ({"truncation": "some"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]},
            "tools[0].parameters.type",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type"),
        (
            {
                "tools": [{"type": "function", "name": "f"}],
                "tool_choice": {"type": "function", "name": "g"},
            },
            "tool_choice.name",
        ),
        (
            {
                "tools": [{"type": "function", "name": "f"}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "g"}],
                },
            },
            "tool_choice.tools[0].name",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}},
            "text.format.schema",
        ),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(body: dict[str, Any], param: str, toy: MakeToy) -> None:
    error = refused(toy(), **body)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_the_tables_for_readers_are_the_tables_of_the_code() -> None:
    page = Path(fields.__file__).with_name("RESPONSES.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", page, re.MULTILINE))
    assert rows == {**fields.NO_MEANING, **fields.REFUSED}

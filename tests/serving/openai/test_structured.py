"""Forms of answers over HTTP: what comes fits, what can't be is refused with its field."""

import json
import re
from typing import Any

import httpx
import pytest
from support.chunk_grammar import read_stream

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def _ask(http: httpx.Client, path: str, **fields: Any) -> str:
    """The text of an answer, which is the same streamed."""
    own: dict[str, Any] = {"messages": [{"role": "user", "content": "Who?"}]}
    if path == TEXT:
        own = {"prompt": "Who? "}
    body = {**own, "max_tokens": 200, "seed": 1, **fields}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    text: str = choice["text"] if path == TEXT else choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    streamed = http.post(path, json={**body, "stream": True})
    assert read_stream(streamed.content, chat=path == CHAT).choices[0].text == text
    return text


def _fits(value: Any) -> bool:
    """Whether a value is one of SCHEMA, told without a library."""
    return (
        set(value) == {"name", "age", "tags"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and value["age"] in range(100)
        and len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a", "b"}
    )


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_json_schema(path: str, http: httpx.Client) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    for fields in (
        {"response_format": wanted},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ):
        assert _fits(json.loads(_ask(http, path, **fields)))


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_choice_and_regex(path: str, http: httpx.Client) -> None:
    wanted: dict[str, Any] = {"choice": ["yes", "no", "perhaps"]}
    assert _ask(http, path, structured_outputs=wanted) in wanted["choice"]
    wanted = {"regex": r"[a-f]{3}-\d{2}"}
    assert re.fullmatch(wanted["regex"], _ask(http, path, structured_outputs=wanted))


def test_text_is_no_form(http: httpx.Client) -> None:
    free = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 9, "seed": 1}
    plain = http.post(CHAT, json=free).json()["choices"]
    asked = http.post(CHAT, json={**free, "response_format": {"type": "text"}}).json()["choices"]
    assert asked == plain


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= ((("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cant_be_compiled_is_refused(
    fields: dict[str, Any], param: str, *, path: str, stream: bool, http: httpx.Client
) -> None:
    own: dict[str, Any] = {"messages": [{"role": "user", "content": "Who?"}]}
    if path == TEXT:
        own = {"prompt": "Who?"}
    answer = http.post(path, json={**own, "stream": stream, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)

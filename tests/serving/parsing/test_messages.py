"""Chat messages as templates take them, rendered by real templates of several kinds."""

import json
from typing import Any

import msgspec
import pytest
from support.tiny_tokenizers import CHATML, byte_level

from ropeway.compiler.errors import RequestError
from ropeway.serving.openai.messages import Message, Tool
from ropeway.serving.parsing.choose import ChatFormat, chat_format
from ropeway.serving.parsing.messages import template_messages
from ropeway.serving.parsing.tools import NO_TOOLS, ToolUse
from ropeway.serving.settings import ServerSettings

# A template in the manner of Qwen's: tools listed, calls and results in places of their own.
KNOWS_TOOLS = """\
{% if tools %}[tools{% for tool in tools %} {{ tool | tojson }}{% endfor %}]
{% endif %}{% for message in messages %}<{{ message.role }}>{{ message.content }}
{% if message.tool_calls %}{% for call in message.tool_calls %}\
<tool_call>{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments | tojson }}}</tool_call>
{% endfor %}{% endif %}{% endfor %}"""
FULL = ChatFormat(tools="hermes", reads_tools=True, reads_calls=True)
BARE = ChatFormat(tools="hermes")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Looks out.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
USE = ToolUse([msgspec.convert(WEATHER, Tool)], "auto")
ASK = {"role": "user", "content": "Rain in Rome and Oslo?"}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": f"call_{k}",
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"city": city})},
        }
        for k, city in enumerate(("Rome", "Oslo"))
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "call_0", "content": "dry"},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "wet"}]},
]


def lowered(
    messages: list[dict[str, Any]], form: ChatFormat = FULL, use: ToolUse = NO_TOOLS
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    return template_messages(msgspec.convert(messages, list[Message]), form, use)


def rendered(template: str, messages: list[dict[str, Any]], use: ToolUse) -> str:
    form = chat_format(ServerSettings(), template)
    made, tools = lowered(messages, form, use)
    return byte_level(template=template).render_chat(made, tools=tools).text


def test_calls_and_results_become_what_templates_read() -> None:
    messages, tools = lowered([ASK, CALLS, *RESULTS], use=USE)
    assert messages == [
        ASK,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": f"call_{k}",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": city}},
                }
                for k, city in enumerate(("Rome", "Oslo"))
            ],
        },
        {"role": "tool", "tool_call_id": "call_0", "name": "weather", "content": "dry"},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "name": "weather",
            "content": [{"type": "text", "text": "wet"}],
        },
    ]
    function = {k: v for k, v in WEATHER["function"].items() if k != "strict"}  # type: ignore[attr-defined]
    assert tools == [{"type": "function", "function": function}]


def test_a_tool_has_all_that_templates_read() -> None:
    tool = msgspec.convert({"function": {"name": "now"}}, Tool)
    _, tools = lowered([ASK], use=ToolUse([tool], "auto"))
    schema = {"type": "object", "properties": {}}
    function = {"name": "now", "description": "", "parameters": schema}
    assert tools == [{"type": "function", "function": function}]


def test_a_template_that_knows_tools_renders_them() -> None:
    text = rendered(KNOWS_TOOLS, [ASK, CALLS, *RESULTS], USE)
    assert text.startswith('[tools {"type": "function", "function": {"name": "weather", ')
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>' in text
    assert "<tool>dry\n<tool>wet\n" in text


def test_a_template_that_knows_no_tools_tells_the_model_of_them_all_the_same() -> None:
    text = rendered(CHATML, [ASK, CALLS, *RESULTS], USE)
    system, user, assistant, results, *rest = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nYou can call functions.")
    assert '{"name": "weather", "description": "Looks out.", "parameters": {' in system
    assert '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>' in system
    assert user == "user\nRain in Rome and Oslo?<|im_end|>\n"
    assert assistant == (
        'assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        "<|im_end|>\n"
    )
    assert results == (
        "user\n<tool_response>\ndry\n</tool_response>\n<tool_response>\nwet\n</tool_response>"
        "<|im_end|>\n"
    )
    assert rest == ["assistant\n"]


def test_a_system_message_keeps_its_place() -> None:
    told = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    messages, tools = lowered([told, ASK], BARE, USE)
    assert tools is None
    assert [one["role"] for one in messages] == ["system", "user"]
    assert messages[0]["content"].startswith("Be brief.\n\nYou can call functions.")


def test_calls_spelled_out_follow_the_text() -> None:
    messages, _ = lowered([ASK, {**CALLS, "content": "Let me see."}], BARE)
    assert messages[1]["content"].startswith('Let me see.\n<tool_call>\n{"name": "weather", ')
    assert "tool_calls" not in messages[1]


def test_messages_of_no_tools_stay_as_they_are() -> None:
    given = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u", "name": "Ann"},
        {"role": "assistant", "content": "a"},
    ]
    assert lowered(given) == (given, None)
    assert lowered(given, BARE) == (given, None)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "developer", "content": "d"}, {"role": "system", "content": "d"}),
        (
            {"role": "assistant", "content": None, "refusal": "No."},
            {"role": "assistant", "content": "No."},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": "r"},
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
        ),
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "call_0",
                        "type": "function",
                        "function": {"name": "f", "arguments": {}},
                    }
                ],
            },
        ),
        (
            {"role": "function", "name": "f", "content": "x"},
            {"role": "tool", "name": "f", "content": "x"},
        ),
        ({"role": "assistant", "content": "a", "tool_calls": []}, None),
    ],
)
def test_single_messages(message: dict[str, Any], expected: dict[str, Any] | None) -> None:
    wanted = expected or {"role": "assistant", "content": "a"}
    assert lowered([message])[0] == [wanted]


def test_a_template_may_know_developers() -> None:
    form = ChatFormat(reads_developer=True)
    assert lowered([{"role": "developer", "content": "d"}], form)[0][0]["role"] == "developer"


def test_mistrals_ids_have_nine_characters_and_still_match() -> None:
    form = ChatFormat(tools="mistral", reads_tools=True, reads_calls=True)
    messages, _ = lowered([ASK, CALLS, *RESULTS], form)
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert [one["tool_call_id"] for one in messages[2:]] == ids
    assert len(set(ids)) == 2
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    given = {**RESULTS[0], "tool_call_id": "abcDEF123"}
    assert lowered([given], form)[0][0]["tool_call_id"] == "abcDEF123"


def call_with(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0].content"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "tool", "tool_call_id": "a"}, "messages[0].content"),
        ({"role": "function", "content": "x"}, "messages[0].name"),
        ({**CALLS, "role": "user"}, "messages[0].tool_calls"),
        (
            call_with(name="f", arguments="{"),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            call_with(name="f", arguments="[1]"),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            call_with(name="f", arguments='{"a": NaN}'),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            call_with(name="f", arguments="[" * 100_000),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "function_call": {"name": "f"}},
            "messages[0].function_call.arguments",
        ),
        ({**CALLS, "function_call": {"name": "f"}}, "messages[0].function_call"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_what_is_refused_is_named(message: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        lowered([message])
    assert caught.value.field == field


def test_a_format_that_nobody_reads_is_refused() -> None:
    with pytest.raises(RequestError, match="--tool-call-parser") as caught:
        lowered([ASK], ChatFormat(tools="none", reads_tools=True), USE)
    assert caught.value.field == "tools"

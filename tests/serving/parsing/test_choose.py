"""Which format a template speaks of."""

import re

import pytest
from support.tiny_tokenizers import byte_level

from ropeway.compiler.errors import InputError
from ropeway.serving.openai.messages import FunctionDefinition, Tool
from ropeway.serving.parsing.call_shape import HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_NAMED
from ropeway.serving.parsing.choose import ChatFormat, chat_format, make_parser
from ropeway.serving.parsing.pieces import CallStart, Content, PlainText, Reasoning
from ropeway.serving.parsing.tools import NO_TOOLS, ToolUse
from ropeway.serving.settings import ServerSettings

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
WITH_TOOLS = PLAIN + "{% if tools %}{{ tools }}{% endif %}{{ message.tool_calls }}"
USE = ToolUse([Tool(function=FunctionDefinition(name="f"))], "auto")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning", "shape"),
    [
        (None, "hermes", "none", HERMES),
        (PLAIN, "hermes", "none", HERMES),
        (WITH_TOOLS + "<tool_call>", "hermes", "none", HERMES),
        (WITH_TOOLS + "<tool_call></think>", "hermes", "think", HERMES),
        (WITH_TOOLS + "<tool_call><function=", "none", "none", HERMES),
        (WITH_TOOLS + "<tool_call><arg_key>", "none", "none", HERMES),
        (WITH_TOOLS + "[TOOL_CALLS]", "mistral", "none", MISTRAL),
        (WITH_TOOLS + "[TOOL_CALLS][ARGS]", "mistral", "none", MISTRAL_NAMED),
        (WITH_TOOLS + "<|python_tag|>", "llama3_json", "none", LLAMA3_JSON),
        (WITH_TOOLS + '"parameters"', "llama3_json", "none", LLAMA3_JSON),
        (WITH_TOOLS + "<some_other_call>", "none", "none", HERMES),
        (PLAIN + "<think>", "hermes", "think", HERMES),
    ],
)
def test_a_templates_text_tells(
    template: str | None, tools: str, reasoning: str, shape: object
) -> None:
    form = chat_format(ServerSettings(), template)
    assert (form.tools, form.reasoning, form.shape) == (tools, reasoning, shape)


def test_what_a_template_reads() -> None:
    form = chat_format(ServerSettings(), WITH_TOOLS)
    assert (form.reads_tools, form.reads_calls, form.reads_developer) == (True, True, False)
    form = chat_format(ServerSettings(), PLAIN + "{% if m.role == 'developer' %}{% endif %}")
    assert (form.reads_tools, form.reads_calls, form.reads_developer) == (False, False, True)


def test_settings_win() -> None:
    settings = ServerSettings(tool_call_parser="mistral", reasoning_parser="none")
    form = chat_format(settings, WITH_TOOLS + "<tool_call><think>")
    assert (form.tools, form.reasoning, form.shape) == ("mistral", "none", MISTRAL)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ServerSettings(tool_call_parser="hermess"),
            "--tool-call-parser: there is no parser 'hermess': "
            "auto, none, hermes, llama3_json, mistral",
        ),
        (
            ServerSettings(reasoning_parser="r1"),
            "--reasoning-parser: there is no parser 'r1': auto, none, think",
        ),
    ],
)
def test_an_unknown_parser_is_told_with_the_known_ones(
    settings: ServerSettings, words: str
) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(words)}$"):
        chat_format(settings, None)


def test_without_tools_calls_are_text() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>'
    parser = make_parser(ChatFormat(tools="hermes"), NO_TOOLS, "")
    assert isinstance(parser, PlainText)
    assert [*parser.push(text), *parser.finish()] == [Content(text)]


def test_thinking_goes_on_from_the_prompt() -> None:
    form = ChatFormat(tools="hermes", reasoning="think")
    parser = make_parser(form, USE, "<|assistant|><think>\n")
    pieces = [*parser.push('Hm</think><tool_call>{"name": "f"}</tool_call>'), *parser.finish()]
    assert pieces[0] == Reasoning("Hm")
    assert isinstance(pieces[1], CallStart)
    assert parser.called


@pytest.mark.parametrize(
    ("tools", "pattern"),
    [
        ("hermes", r"call_[0-9a-f]{24}"),
        ("llama3_json", r"call_[0-9a-f]{24}"),
        ("mistral", r"[a-zA-Z0-9]{9}"),
    ],
)
def test_ids_are_such_as_the_models_templates_take(tools: str, pattern: str) -> None:
    form = chat_format(ServerSettings(tool_call_parser=tools), None)
    parser = make_parser(form, USE, "")
    calls = [*parser.push(form.shape.text([("f", {}), ("f", {})])), *parser.finish()]
    ids = [piece.call_id for piece in calls if isinstance(piece, CallStart)]
    assert len(set(ids)) == 2
    assert all(re.fullmatch(pattern, one) for one in ids)


def test_special_tokens_are_shown_where_a_marker_is_one() -> None:
    plain = byte_level()
    special = byte_level(added=(), special=("[TOOL_CALLS]", "<think>"))
    mistral = ChatFormat(tools="mistral")
    assert mistral.needs_special_tokens(USE, special)
    assert not mistral.needs_special_tokens(USE, plain)
    assert not mistral.needs_special_tokens(NO_TOOLS, special)
    assert not ChatFormat(tools="hermes").needs_special_tokens(USE, special)
    assert ChatFormat(reasoning="think").needs_special_tokens(NO_TOOLS, special)
    assert not ChatFormat(reasoning="think").needs_special_tokens(NO_TOOLS, plain)

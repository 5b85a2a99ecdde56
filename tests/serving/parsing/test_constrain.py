"""Constraints against the parsers: whatever a model writes under one, its parser reads as calls."""

import functools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.answer_pieces import Joined, joined
from support.tiny_tokenizers import byte_level

from ropeway.compiler.errors import RequestError
from ropeway.runtime.sampling.structured import StructuredOutputs
from ropeway.runtime.structured.source import grammar_source
from ropeway.runtime.text.tokenizer import Tokenizer
from ropeway.serving.openai.messages import FunctionDefinition, Tool
from ropeway.serving.parsing.choose import ChatFormat, chat_format, make_parser
from ropeway.serving.parsing.constrain import constraint
from ropeway.serving.parsing.tools import NO_TOOLS, ToolUse
from ropeway.serving.settings import ServerSettings

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo; {}", "</tool_call>"]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
    },
    "required": ["city"],
    "$defs": {"day": {"enum": [1, 2]}},
}
SCHEMAS: dict[str, Any] = {"weather": CITY, "now": {"type": "object", "properties": {}}}
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
THINK = ("<think>", "</think>")


def tools(strict: bool | None = None) -> list[Tool]:
    weather = FunctionDefinition(name="weather", parameters=CITY, strict=strict)
    return [Tool(function=weather), Tool(function=FunctionDefinition(name="now"))]


@functools.cache
def tokenizer(special: bool) -> tuple[Tokenizer, LLTokenizer]:
    """Its markers are special tokens, or tokens that aren't."""
    marks = {"added": (), "special": MARKERS + THINK} if special else {"added": MARKERS + THINK}
    made = byte_level(**marks)
    return made, LLTokenizer(made.serialized(), eos_token=2)


def form_of(name: str, reasoning: str = "none") -> ChatFormat:
    template = "[TOOL_CALLS][ARGS]" if name == "named" else None
    parser = "mistral" if name == "named" else name
    settings = ServerSettings(tool_call_parser=parser, reasoning_parser=reasoning)
    return chat_format(settings, template)


def written(
    structured: StructuredOutputs, special: bool, seed: int, first: str = "", limit: int = 300
) -> str | None:
    """A random text that the constraint allows, after `first`; None if it got too long."""
    own, vocabulary = tokenizer(special)
    matcher = LLMatcher(vocabulary, grammar_source(structured))
    assert not matcher.is_error(), matcher.get_error()
    draw = random.Random(seed)
    ids = own.encode(first, add_special_tokens=False)
    assert matcher.try_consume_tokens(ids) == len(ids)
    words = np.zeros(-(-vocabulary.vocab_size // 32), np.int32)
    for _ in range(limit):
        if matcher.is_stopped():
            break
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        token = int(draw.choice(np.flatnonzero(bits)))
        if bits[2] and draw.random() < 0.5:
            token = 2
        matcher.consume_token(token)
        if token != 2:
            ids.append(token)
    else:
        return None
    assert not matcher.is_error(), matcher.get_error()
    return own.decode(ids, skip_special_tokens=False)


def parsed(form: ChatFormat, use: ToolUse, text: str, end: str = "") -> Joined:
    parser = make_parser(form, use, end)
    return joined([*parser.push(text), *parser.finish()])


FORMATS = ("hermes", "llama3_json", "mistral", "named")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("which", ["required", "one", "weather"])
def test_what_is_written_under_a_constraint_are_calls(name: str, special: bool, which: str) -> None:
    own, _ = tokenizer(special)
    form = form_of(name)
    use = {
        "required": ToolUse(tools(), "required"),
        "one": ToolUse(tools(), "required", None, parallel=False),
        "weather": ToolUse(tools(), "required", "weather"),
    }[which]
    structured = constraint(form, use, own, "")
    assert structured is not None
    texts = [written(structured, special, seed) for seed in range(25)]
    whole = [text for text in texts if text is not None]
    assert len(whole) > 15
    seen = set()
    for text in whole:
        calls = parsed(form, use, text)
        assert calls
        assert which == "required" or len(calls) == 1
        for call in calls:
            assert call[0] == "call"
            jsonschema.validate(json.loads(call[2]), SCHEMAS[call[1]])
            assert set(json.loads(call[2])) <= set(SCHEMAS[call[1]]["properties"])
            seen.add(call[1])
    assert seen == ({"weather"} if which == "weather" else {"weather", "now"})


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("end", ["", "<|im_start|>assistant\n<think>\n"], ids=["free", "opened"])
@pytest.mark.parametrize("asks", [False, True], ids=["call", "json"])
def test_thinking_comes_before_what_is_constrained(special: bool, end: str, asks: bool) -> None:
    own, _ = tokenizer(special)
    form = form_of("hermes", "think")
    use = NO_TOOLS if asks else ToolUse(tools(), "required", "now")
    asked = StructuredOutputs(json={"enum": [[1], 2]}) if asks else None
    structured = constraint(form, use, own, end, asked)
    assert structured is not None
    first = ("" if end else "<think>") + 'So: {"a"} <b>\n</think>\n\n'
    text = written(structured, special, 1, first)
    assert text is not None
    thoughts, answer = parsed(form, use, text, end)
    assert thoughts == ("reasoning", 'So: {"a"} <b>')
    if asks:
        assert answer[0] == "content"
        assert json.loads(answer[1]) in ([1], 2)
    else:
        assert answer == ("call", "now", "{}")
    if not end:  # thinking may be left out
        texts = [written(structured, special, seed, "2" if asks else "") for seed in range(9)]
        assert any(text is not None and "think" not in text for text in texts)


@pytest.mark.parametrize("name", FORMATS)
def test_free_to_call_or_to_answer_in_a_form(name: str) -> None:
    own, _ = tokenizer(False)
    form = form_of(name)
    use = ToolUse(tools(), "auto")
    answer = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    asked = StructuredOutputs(json={**answer, "additionalProperties": False})
    structured = constraint(form, use, own, "", asked)
    assert structured is not None
    text = written(structured, False, 3, '{"ok"')
    assert text is not None
    assert parsed(form, use, text) == [("content", text)]
    jsonschema.validate(json.loads(text), answer)
    begin = "<|python_tag|>" if name == "llama3_json" else form.shape.text([("now", {})])
    call = written(structured, False, 4, begin)
    assert call is not None
    assert {one[0] for one in parsed(form, use, call)} == {"call"}


@pytest.mark.parametrize(
    "asked",
    [
        StructuredOutputs(json_object=True),
        StructuredOutputs(regex="a+b"),
        StructuredOutputs(choice=["yes", "no"]),
        StructuredOutputs(grammar='start: "x" /[0-9]+/'),
        StructuredOutputs(grammar='root ::= "x" [0-9]+'),
    ],
    ids=lambda one: one.kind,
)
def test_what_a_request_asks_is_passed_on_or_put_behind_the_thinking(
    asked: StructuredOutputs,
) -> None:
    own, _ = tokenizer(False)
    assert constraint(form_of("hermes"), NO_TOOLS, own, "", asked) is asked
    thinking = constraint(form_of("hermes", "think"), NO_TOOLS, own, "<think>", asked)
    assert thinking is not None
    first = "Hm.</think>"
    begin = {"json_object": "{", "regex": "a", "choice": "y"}.get(asked.kind, "x")
    texts = (written(thinking, False, seed, first + begin) for seed in range(40))
    behind = next(text for text in texts if text is not None)
    rest = behind.removeprefix(first)
    _, vocabulary = tokenizer(False)
    matcher = LLMatcher(vocabulary, grammar_source(asked))
    ids = own.encode(rest.lstrip(), add_special_tokens=False)
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


def test_free_models_are_left_free() -> None:
    own, _ = tokenizer(False)
    assert constraint(form_of("hermes"), NO_TOOLS, own, "") is None
    assert constraint(form_of("hermes"), ToolUse(tools(), "auto"), own, "") is None
    assert constraint(form_of("mistral"), ToolUse(tools(strict=True), "auto"), own, "") is None


def test_strict_functions_bind_a_call_once_it_begins() -> None:
    own, vocabulary = tokenizer(False)
    structured = constraint(form_of("hermes"), ToolUse(tools(strict=True), "auto"), own, "")
    assert structured is not None

    def taken(text: str) -> bool:
        matcher = LLMatcher(vocabulary, grammar_source(structured))
        ids = own.encode(text, add_special_tokens=False)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    head = 'Hi {}.\n<tool_call>\n{"name": "weather", "arguments": '
    assert taken("Any text.")
    assert taken(head + '{"city": "Rome"}}\n</tool_call> More.')
    assert not taken(head + '{"city": "Paris"}}\n</tool_call>')
    assert not taken(head + '{"days": []}}\n</tool_call>')


def test_contradictions_and_schemas_that_cant_be_compiled() -> None:
    own, _ = tokenizer(False)
    form = form_of("hermes")
    with pytest.raises(RequestError) as caught:
        constraint(form, ToolUse(tools(), "required"), own, "", StructuredOutputs(regex="a"))
    assert caught.value.field == "tool_choice"
    for wrong in ({"$ref": "#/nowhere"}, {"type": "strin"}, {"pattern": "(?=a)"}):
        parameters = {"type": "object", "properties": {"a": {"type": "string", **wrong}}}
        bad = Tool(function=FunctionDefinition(name="bad", parameters=parameters))
        for legacy in (False, True):
            use = ToolUse([*tools(), bad], "required", legacy=legacy)
            with pytest.raises(RequestError, match="parameters of 'bad'") as caught:
                constraint(form, use, own, "")
            assert caught.value.field == ("functions" if legacy else "tools")
        assert constraint(form, ToolUse([bad], "auto"), own, "") is None
    with pytest.raises(RequestError) as caught:
        constraint(form, NO_TOOLS, own, "", StructuredOutputs(regex="("))
    assert caught.value.field == "structured_outputs.regex"

"""Parsers of tool calls: whole texts against other readers, and every cut against the whole."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.answer_pieces import Joined, cut, places, read

from ropeway.serving.parsing.hermes import HermesParser
from ropeway.serving.parsing.llama3_json import Llama3JsonParser
from ropeway.serving.parsing.mistral import MistralParser
from ropeway.serving.parsing.pieces import OutputParser

NAMES = ("f", "get_weather", "now")


def hermes(single: bool = False) -> OutputParser:
    return HermesParser(lambda: "id", single=single)


def llama(single: bool = False) -> OutputParser:
    return Llama3JsonParser(lambda: "id", NAMES, single=single)


def mistral(single: bool = False) -> OutputParser:
    return MistralParser(lambda: "id", single=single)


PARSERS = {"hermes": hermes, "llama": llama, "mistral": mistral}
arguments = st.dictionaries(
    st.sampled_from(["city", "n", "</tool_call>", "a;b", "}]"]),
    st.integers() | st.text(max_size=6) | st.lists(st.none(), max_size=2),
    max_size=3,
).map(json.dumps)
calls = st.tuples(st.sampled_from(NAMES), arguments)
words = st.text(st.characters(exclude_characters="<[{;", exclude_categories=["Cs"]), min_size=1)


def trimmed(pieces: Joined) -> Joined:
    return [one for one in pieces if one[0] != "content" or one[1]]


@settings(deadline=None)
@given(st.lists(st.tuples(words, calls), max_size=3), words, places)
def test_hermes_calls_between_texts(parts: Any, last: str, at: Any) -> None:
    text, expected = "", []
    for word, (name, args) in parts:
        text += f'{word}\n<tool_call>\n{{"name": "{name}", "arguments": {args}}}\n</tool_call>'
        expected += [("content", word.strip()), ("call", name, args)]
    text += last
    if parts:
        expected.append(("content", last.strip()))
        # Space at the very begin and end stands beside no marker.
        begin = parts[0][0]
        expected[0] = ("content", begin.rstrip())
        expected[-1] = ("content", last.lstrip())
    else:
        expected = [("content", last)]
    assert read(hermes, [text]) == trimmed(expected)
    assert read(hermes, cut(text, at)) == trimmed(expected)


@settings(deadline=None)
@given(st.lists(calls, min_size=1, max_size=3), st.booleans(), st.sampled_from([";", "; ", " ;\n"]))
def test_llama_calls(made: Any, tagged: bool, between: str) -> None:
    texts = [f'{{"name": "{name}", "parameters": {args}}}' for name, args in made]
    text = ("Hm.\n<|python_tag|>" if tagged else "") + between.join(texts)
    expected = [("call", name, args) for name, args in made]
    if tagged:
        expected.insert(0, ("content", "Hm."))
    assert read(llama, [text]) == expected
    assert read(llama, list(text)) == expected


@settings(deadline=None)
@given(st.lists(calls, min_size=1, max_size=3), st.sampled_from(["list", "named", "bare", "ids"]))
def test_mistral_calls(made: Any, style: str) -> None:
    expected = [("call", name, args) for name, args in made]
    if style == "list":
        listed = ", ".join(f'{{"name": "{name}", "arguments": {args}}}' for name, args in made)
        text = f"[TOOL_CALLS] [{listed}]"
    else:
        mark = {"named": "[ARGS]", "bare": "", "ids": "[CALL_ID]abcDEF123[ARGS]"}[style]
        text = "".join(f"[TOOL_CALLS]{name}{mark}{args}" for name, args in made)
    assert read(mistral, [text]) == expected
    assert read(mistral, list(text)) == expected
    assert read(mistral, [f"Well\n{text} done"]) == [
        ("content", "Well"),
        *expected,
        ("content", "done"),
    ]


FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool", "_call>", '{"name": "f", "arguments": {}}'],
    "llama": ["<|python_tag|>", "<|py", '{"name": "f", "parameters": {}}', ";", '{"title": 1}'],
    "mistral": ["[TOOL_CALLS]", "[TOOL", "f[ARGS]{}", "[ARGS]", "f[CALL_ID]x1", "[{", "]", ","],
}
ANY = ["{", "}", '"', '{"name": "f", ', '"arguments": {"a": ', "1", "}}", " ", "\n", "x", "é", ":"]


@pytest.mark.parametrize("name", PARSERS)
@settings(deadline=None)
@given(data=st.data(), at=places)
def test_garbage_comes_out_the_same_however_it_is_cut(name: str, data: Any, at: Any) -> None:
    parts = data.draw(st.lists(st.sampled_from(FRAGMENTS[name] + ANY), max_size=16))
    text = "".join(parts)
    make: Callable[[], OutputParser] = PARSERS[name]
    whole = read(make, [text])
    assert read(make, cut(text, at)) == whole
    assert read(make, list(text)) == whole
    _account(whole, text)


def _account(pieces: Joined, text: str) -> None:
    """Without calls all text is content; with them, what is left out is what marks calls."""
    if all(one[0] == "content" for one in pieces):
        assert "".join(one[1] for one in pieces) == text
        return
    shown = "".join(one[-1] for one in pieces)
    left = list(text)
    for char in shown:  # what is shown stands in the text, in order
        left = left[left.index(char) :]
        left.pop(0)
    count = {char: text.count(char) - shown.count(char) for char in set(text)}
    assert count.get("é", 0) == 0
    hidden = sum(amount for char, amount in count.items() if not char.isspace())
    markup = len(
        '[TOOL_CALLS]<tool_call></tool_call>{"name":"f","arguments":}f[CALL_ID]x1[ARGS],{};]'
    )
    assert hidden <= markup * sum(one[0] == "call" for one in pieces)


@settings(deadline=None)
@given(st.lists(st.sampled_from([*FRAGMENTS["hermes"], *ANY, "<", ">"]), max_size=14))
def test_hermes_against_a_reader_of_whole_texts(parts: list[str]) -> None:
    text = "".join(parts)
    assert read(hermes, [text]) == _read_hermes(text)


def _read_hermes(text: str) -> Joined:
    """Calls by a regular expression and Python's JSON; passes on texts whose calls break late."""
    made: Joined = []
    content, at = "", 0
    for mark in re.finditer(r"\s*<tool_call>", text):
        if mark.start() < at and mark.end() <= at:
            continue
        begun = re.compile(r'\s*\{\s*"name"\s*:\s*"f"\s*,\s*"arguments"\s*:\s*\{')
        try:
            skip = re.compile(r"\s*").match(text, mark.end())
            assert skip
            call, end = json.JSONDecoder().raw_decode(text, skip.end())
        except ValueError:
            assume(not begun.match(text, mark.end()))
            continue
        if not isinstance(call, dict) or call.get("name") != "f" or len(call) > 2:
            assume(not begun.match(text, mark.end()))
            continue
        assume(set(call) <= {"name", "arguments"} and isinstance(call.get("arguments", {}), dict))
        body = text[skip.end() : end]
        assume(body.count('"name"') == 1 and body.count('"arguments"') <= 1)
        found = re.search(r'"arguments"\s*:\s*', body)
        args = body[found.end() :].removesuffix("}").rstrip() if found else "{}"
        content += text[at : max(mark.start(), at)]
        made += [("content", content)] if content else []
        made.append(("call", "f", args))
        close = re.compile(r"\s*</tool_call>\s*").match(text, end)
        content, at = "", close.end() if close else end
        partial = re.compile(r"\s*(<(/(t(o(o(l(_(c(a(l(l)?)?)?)?)?)?)?)?)?)?)?").fullmatch(
            text, end
        )
        if partial:
            return made
    content += text[at:]
    return made + ([("content", content)] if content else [])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", "", []),
        ("hermes", " \n", [("content", " \n")]),
        ("hermes", "a <tool_call", [("content", "a <tool_call")]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("call", "f", "{}")]),
        ("hermes", '<tool_call>{"name": "f"}', [("call", "f", "{}")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', [("call", "f", '{"a": 1}')]),
        (
            "hermes",
            '<tool_call>{"name": "f", "id": [1], "arguments": {}, "x": null}</tool_call>',
            [("call", "f", "{}")],
        ),
        (  # a call that is cut off keeps what came of its arguments
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "lo',
            [("call", "f", '{"a": "lo')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call> bye',
            [("call", "f", '{"a": '), ("content", "oops}}</tool_call> bye")],
        ),
        (
            "hermes",
            '<tool_call>oops</tool_call><tool_call>{"name": "f"}',
            [("content", "<tool_call>oops</tool_call>"), ("call", "f", "{}")],
        ),
        *[
            (
                "hermes",
                f"<tool_call>{call}</tool_call>",
                [("content", f"<tool_call>{call}</tool_call>")],
            )
            for call in (
                "[]",
                "{}",
                '{"name": "", "arguments": {}}',
                '{"name": 3, "arguments": {}}',
                '{"name": "a b", "arguments": {}}',
                '{"name": "\\ud800", "arguments": {}}',
                '{"name": "f", "arguments": "{}"}',
                '{"name": "f", "arguments": null}',
                '{"name": "f", "name": "g"}',
                '{"arguments": {}, "parameters": {}, "name": "f"}',
                "{'name': 'f'}",
            )
        ],
        ("llama", ' {"name": "f", "parameters": {}}', [("call", "f", "{}")]),
        ("llama", '{"name": "other", "parameters": {}}', "content"),
        ("llama", '<|python_tag|>{"name": "other", "parameters": {}}', [("call", "other", "{}")]),
        ("llama", '{"name": "f"}', "content"),
        ("llama", '{"name": "f", "age": 3, "parameters": {}}', "content"),
        ("llama", 'It is {"name": "f", "parameters": {}}', "content"),
        ("llama", "<|python_tag|>print(1)", "content"),
        (
            "llama",
            '{"name": "f", "parameters": {}}; and so on',
            [("call", "f", "{}"), ("content", "; and so on")],
        ),
        ("mistral", "[TOOL_CALLS] []", "content"),
        ("mistral", "[TOOL_CALLS]f", "content"),
        ("mistral", "[TOOL_CALLS]f [ARGS", "content"),
        ("mistral", "[TOOL_CALLS]f[ARGS]3", "content"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}', [("call", "f", "{}")]),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {}}, 3]',
            [("call", "f", "{}"), ("content", ", 3]")],
        ),
        (
            "mistral",
            '[TOOL_CALLS]f{"a": 1, oops',
            [("call", "f", '{"a": 1, '), ("content", "oops")],
        ),
    ],
)
def test_texts(name: str, text: str, expected: Joined | str) -> None:
    wanted = [("content", text)] if expected == "content" else expected
    make: Callable[[], OutputParser] = PARSERS[name]
    assert read(make, [text]) == wanted
    assert read(make, list(text)) == wanted


def test_an_id_of_the_models_own_is_kept() -> None:
    [start, *_] = mistral().push("[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}")
    assert getattr(start, "call_id", None) == "abcDEF123"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call> x <tool_call>{"name": "f"}</tool_call>'),
        ("llama", '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}} x'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f"}] x'),
        ("mistral", "[TOOL_CALLS]f{}[TOOL_CALLS]f{}"),
    ],
)
def test_at_most_one_call_where_one_was_asked_for(name: str, text: str) -> None:
    make: Any = PARSERS[name]
    assert read(lambda: make(single=True), [text]) == [("call", "f", "{}")]
    assert read(lambda: make(single=True), list(text)) == [("call", "f", "{}")]


def test_one_call_that_breaks_leaves_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {x} <tool_call>{"name": "f"}'
    assert read(lambda: hermes(single=True), [text]) == [
        ("call", "f", "{"),
        ("content", 'x} <tool_call>{"name": "f"}'),
    ]


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("hermes", "ab <tool", "ab"),
        ("hermes", "ab <tools", "ab <tools"),
        ("hermes", "ab<", "ab"),
        ("hermes", "ab\n", "ab"),
        ("mistral", "ab [TOOL_CALLS", "ab"),
        ("mistral", "ab [TOO]", "ab [TOO]"),
        ("llama", "ab <|python_ta", "ab"),
    ],
)
def test_what_may_be_a_marker_is_held_back_and_nothing_else(
    name: str, text: str, shown: str
) -> None:
    make: Callable[[], OutputParser] = PARSERS[name]
    parser = make()
    assert "".join(getattr(piece, "text", "") for piece in parser.push(text)) == shown


def test_arguments_are_told_while_they_come() -> None:
    parser = hermes()
    parser.push('<tool_call>{"name": "f", "arguments": {"city": "')
    assert [getattr(p, "text", None) for p in parser.push("Ro")] == ["Ro"]
    assert [getattr(p, "text", None) for p in parser.push('me"')] == ['me"']
    assert [getattr(p, "text", None) for p in parser.push("}}</tool_call>")] == ["}"]

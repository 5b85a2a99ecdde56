"""What can't be compiled is refused by its field in one line; nothing is served unconstrained."""

import json
import subprocess
import sys
import threading
from typing import Any

import msgspec
import pytest
from support.char_tokenizer import END, char_tokenizer

from ropeway.compiler.errors import RequestError
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.runtime.sampling.structured import StructuredOutputs
from ropeway.runtime.structured import compiler as compiler_module
from ropeway.runtime.structured.check import check_structured
from ropeway.runtime.structured.compiler import GrammarCompiler


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(char_tokenizer, 97, (END,))


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


# fields, the field that is named, a part of the message
WHATEVER_THE_VOCABULARY: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": "("}, "regex", "unclosed group"),
    ({"regex": "(?=a)b"}, "regex", "look-around"),
    ({"regex": r"(a)\1"}, "regex", "backreferences"),
    ({"regex": "(" * 5000 + ")" * 5000}, "regex", "nested"),
    ({"regex": "a" * (33 << 10)}, "regex", "too large"),
    ({"regex": "\ud800"}, "regex", "Unicode"),
    ({"json": {"type": "text"}}, "json", "Invalid type: text"),
    ({"json": "{"}, "json", "isn't JSON"),
    ({"json": "[]"}, "json", "a schema is an object"),
    ({"json": "false"}, "json", "no text matches"),
    ({"json": '"' + "x" * (257 << 10) + '"'}, "json", "too large"),
    ({"json": {"const": "x" * (257 << 10)}}, "json", "too large"),
    ({"json": {"const": "\ud800"}}, "json", "JSON"),
    ({"json": {"const": object()}}, "json", "JSON"),
    ({"json": deep(200)}, "json", "nested deeper"),
    ({"json": json.dumps(deep(200))}, "json", "nested deeper"),
    ({"json": "[" * 100_000}, "json", "isn't JSON"),
    ({"json": {"type": "array", "uniqueItems": True}}, "json", "uniqueItems"),
    ({"json": {"not": {}}}, "json", "not"),
    ({"json": {"$ref": "http://localhost/x.json"}}, "json", "not fetch"),
    ({"json": {"$ref": "file:///etc/hostname"}}, "json", "not fetch"),
    ({"json": {"$ref": "#/nowhere"}}, "json", "does not exist"),
    ({"json": {"type": "integer", "minimum": 3, "maximum": 1}}, "json", "Unsatisfiable"),
    ({"json": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "json", "oneOf"),
    ({"json_object": True, "whitespace_pattern": "("}, "json_object", "unclosed group"),
    ({"json_object": True, "whitespace_pattern": " " * 2000}, "whitespace_pattern", "too large"),
    ({"grammar": ""}, "grammar", ""),
    ({"grammar": "start: nothing"}, "grammar", 'unknown name: "nothing"'),
    ({"grammar": "start: A\nA: B\nB: A"}, "grammar", "circular"),
    ({"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "grammar", "nested"),
    ({"grammar": "root ::= ("}, "grammar", "Expected"),
    ({"grammar": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000}, "grammar", "recursion"),
    ({"grammar": "start: @other"}, "grammar", "other"),
    ({"grammar": "#" * (129 << 10)}, "grammar", "too large"),
    ({"choice": [f"{n}" * 60 for n in range(2000)]}, "choice", "too large"),
    ({"structural_tag": "{"}, "structural_tag", "isn't JSON"),
    ({"structural_tag": {"format": {}}}, "structural_tag", "format"),
    ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "structural_tag", "empty"),
    (
        {"structural_tag": {"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]}},
        "structural_tag",
        "none of the triggers",
    ),
]
OF_THE_VOCABULARY: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": ""}, "regex", "no text but the empty one"),
    ({"regex": r"[^\s\S]"}, "regex", "no text matches"),
    ({"regex": "日本"}, "regex", ""),  # no token of this vocabulary spells it
    ({"json": {"$ref": "#"}}, "json", "no text matches"),
    ({"grammar": "start: start"}, "grammar", "no text matches"),
    ({"grammar": "start: <|nope|>"}, "grammar", "unknown special token"),
    ({"grammar": "start: <[5000]>"}, "grammar", "too large"),
    ({"grammar": 'start: x{1000000}\nx: "a" "b"'}, "grammar", "Too many items"),
    (
        {
            "json": {
                "type": "object",
                "properties": {f"p{n}": {"type": "string"} for n in range(1200)},
            }
        },
        "json",
        "items",
    ),
]


def refused(call: Any, field: str, part: str) -> None:
    with pytest.raises(RequestError) as caught:
        call()
    assert caught.value.field == f"structured_outputs.{field}"
    message = str(caught.value)
    assert part in message and "\n" not in message and len(message) < 400


@pytest.mark.parametrize(("fields", "field", "part"), WHATEVER_THE_VOCABULARY)
def test_refused_with_and_without_a_vocabulary(
    compiler: GrammarCompiler, fields: dict[str, Any], field: str, part: str
) -> None:
    asked = StructuredOutputs(**fields)
    refused(lambda: compiler.compile(asked), field, part)
    refused(lambda: check_structured(asked), field, part)


@pytest.mark.parametrize(("fields", "field", "part"), OF_THE_VOCABULARY)
def test_refused_when_compiled(
    compiler: GrammarCompiler, fields: dict[str, Any], field: str, part: str
) -> None:
    refused(lambda: compiler.compile(StructuredOutputs(**fields)), field, part)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json_object": False},
        {"json": 3},
        {"json": []},
        {"regex": 3},
        {"regex": b"a"},
        {"grammar": ["start"]},
        {"choice": []},
        {"choice": "yes"},
        {"choice": ["yes", 3]},
        {"choice": ["yes", ""]},
        {"json_object": 1},
        {"structural_tag": []},
        {"regex": "a", "whitespace_pattern": " "},
        {"regex": "a", "disable_any_whitespace": True},
        {"choice": ["a"], "disable_additional_properties": True},
        {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
        {"json": {}, "disable_any_whitespace": 1},
    ],
)
def test_wrong_forms(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputs(**fields)
    assert caught.value.field.startswith("structured_outputs")


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "object", "properties": {"a": {"enum": [1, None, "x"]}}}},
        {"json": '{"type": "integer"}', "whitespace_pattern": " ?"},
        {"regex": "a+"},
        {"choice": ("a", "b", "a")},
        {"grammar": 'start: "a"'},
        {"json_object": True, "disable_any_whitespace": True},
        {"structural_tag": {"structures": [{"begin": "<a>"}], "triggers": ["<"]}},
    ],
)
def test_what_is_asked_crosses_processes(fields: dict[str, Any]) -> None:
    params = SamplingParams(
        structured_outputs=StructuredOutputs(**fields), allowed_token_ids={9, 2}
    )
    for codec in (msgspec.msgpack, msgspec.json):
        assert codec.decode(codec.encode(params), type=SamplingParams) == params
    assert params.allowed_token_ids == (2, 9)


@pytest.mark.parametrize("ids", [[], [-1], [1.5], [True], "12", 7, [2**31]])
def test_allowed_token_ids_are_checked(ids: Any) -> None:
    with pytest.raises(RequestError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=ids)


def test_a_model_without_tokenizer_or_end_is_refused() -> None:
    asked = StructuredOutputs(regex="a")
    with pytest.raises(RequestError, match="no tokenizer"):
        GrammarCompiler(None, 97).compile(asked)
    with pytest.raises(RequestError, match="no end token"):
        GrammarCompiler(char_tokenizer, 97).compile(asked)
    with pytest.raises(RequestError, match="tokenizer can't be constrained"):
        GrammarCompiler(char_tokenizer, 50, (3,)).compile(asked)


def test_a_disjoint_one_of_is_exact_and_taken(compiler: GrammarCompiler) -> None:
    compiler.compile(StructuredOutputs(json={"oneOf": [{"type": "integer"}, {"type": "boolean"}]}))


def test_grammars_are_kept_by_content_the_latest_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "CACHED_GRAMMARS", 2)
    compiler = GrammarCompiler(char_tokenizer, 97, (END,))

    def get(name: str) -> object:
        return compiler.compile(StructuredOutputs(json={"const": name}))

    first, second = get("a"), get("b")
    assert get("a") is first and first is not second
    get("c")  # "b" was used longest ago
    assert get("a") is first
    assert get("b") is not second
    spelled = compiler.compile(StructuredOutputs(json='{"const": "b"}'))
    assert spelled is get("b")
    closed = compiler.compile(StructuredOutputs(json={"const": "b"}, disable_any_whitespace=True))
    assert closed is not spelled


def test_many_threads_compile_at_once() -> None:
    compiler = GrammarCompiler(char_tokenizer, 97, (END,))
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for n in range(20):
                compiler.compile(StructuredOutputs(regex=f"[a-z]{{{1 + (n + number) % 7}}}"))
                with pytest.raises(RequestError):
                    compiler.compile(StructuredOutputs(regex="("))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_llguidance_is_imported_by_the_first_grammar_only() -> None:
    code = """
import sys
from ropeway.runtime.structured.check import check_structured
from ropeway.runtime.sampling.structured import StructuredOutputs
assert "numpy" not in sys.modules
import ropeway.runtime.loader
from ropeway.runtime.structured.compiler import GrammarCompiler
GrammarCompiler(None, 5)
assert "llguidance" not in sys.modules
check_structured(StructuredOutputs(regex="a"))
assert "llguidance" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

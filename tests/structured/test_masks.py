"""What a matcher allows next, token by token, against oracles that know nothing of llguidance.

A regular expression's oracle is the `regex` package's partial match: a prefix may go on if some
text that begins with it matches.
"""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex
from support.char_tokenizer import END, char_tokenizer
from support.tiny_tokenizers import byte_level, sentencepiece

from ropeway.runtime.sampling.batch import mask_bits, mask_words
from ropeway.runtime.sampling.structured import StructuredOutputs
from ropeway.runtime.structured.compiler import GrammarCompiler
from ropeway.runtime.structured.grammar import Matcher
from ropeway.runtime.text.tokenizer import Tokenizer

CHARS = char_tokenizer()


class Vocabulary:
    """A tokenizer, its compiler, and the bytes of its tokens."""

    def __init__(self, tokenizer: Tokenizer, padding: int = 0) -> None:
        self.tokenizer = tokenizer
        self.size = tokenizer.vocab_size + padding
        self.ends = tokenizer.eos_ids
        self.compiler = GrammarCompiler(lambda: tokenizer, self.size, self.ends)

    def start(self, **fields: Any) -> Matcher:
        return self.compiler.compile(StructuredOutputs(**fields)).matcher()

    def allowed(self, matcher: Matcher) -> set[int]:
        words = np.full(mask_words(self.size), -1, np.int32)
        matcher.fill(words)
        assert not matcher.error
        return set(np.flatnonzero(mask_bits(words, self.size)).tolist())

    def walk(self, matcher: Matcher, text: str) -> bool:
        """Whether every token of the text was allowed."""
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            if matcher.finished or token not in self.allowed(matcher):
                return False
            matcher.commit(token)
        return True


@pytest.fixture(scope="module")
def chars() -> Vocabulary:
    return Vocabulary(CHARS)


PATTERNS = [
    "a{3,5}",
    "(ab|ac|abd)+",
    "[0-9]{1,3}(\\.[0-9]{1,3}){3}",
    "yes|no|yes!",
    "[A-Z][a-z]*( [A-Z][a-z]*){0,2}",
    "-?(0|[1-9][0-9]*)(\\.[0-9]+)?",
    "\"([^\"\\\\]|\\\\.)*\"",
    "(a|b)*abb",
    "x?y?z?",
    "[^a-z]{2}",
    "\\{\\[\\(/\\)\\]\\}",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regex_allows_what_some_match_begins_with(chars: Vocabulary, pattern: str) -> None:
    compiled = regex.compile(pattern)
    for seed in range(8):
        rng = random.Random(seed)
        matcher, text = chars.start(regex=pattern), ""
        for _ in range(12):
            allowed = chars.allowed(matcher)
            for token in range(95):
                longer = text + chr(32 + token)
                goes_on = compiled.fullmatch(longer, partial=True) is not None
                assert (token in allowed) == goes_on, (text, longer)
            assert (END in allowed) == (compiled.fullmatch(text) is not None)
            assert 96 not in allowed, "a special token is no text"
            letters = sorted(allowed - {END})
            if not letters:
                break
            token = rng.choice(letters)
            matcher.commit(token)
            text += chr(32 + token)
            if matcher.finished:
                break
        if matcher.finished:
            assert compiled.fullmatch(text)
            assert not any(
                compiled.fullmatch(text + chr(c), partial=True) for c in range(32, 127)
            ), "nothing can follow a finished text"


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize(
    "pattern", ["[a-z ]{0,12}", "(Hello|hello) (there|again|the cat)", "日本|ภาษา"]
)
def test_tokens_of_several_characters_and_of_parts_of_one(make: Any, pattern: str) -> None:
    vocabulary = Vocabulary(make())
    compiled = regex.compile(pattern)
    tokenizer = vocabulary.tokenizer
    for seed in range(4):
        rng = random.Random(seed)
        matcher, text = vocabulary.start(regex=pattern), b""
        for _ in range(16):
            allowed, expected = vocabulary.allowed(matcher), set()
            for token in range(tokenizer.vocab_size):
                piece = tokenizer.token_bytes(token)
                if tokenizer.is_special(token) or not piece:
                    continue
                if may_follow(compiled, text + piece):
                    expected.add(token)
            rest = sorted(allowed - set(vocabulary.ends))
            first = {tokenizer.token_bytes(token)[0] for token in expected}
            if len(first) > 1:
                assert set(rest) == expected, text
            else:  # text that is forced comes in the tokenizer's own way to cut it
                assert set(rest) <= expected and bool(rest) == bool(expected), text
            if not rest:
                break
            token = rng.choice(rest)
            matcher.commit(token)
            text += tokenizer.token_bytes(token)
            if matcher.finished:
                break


def may_follow(compiled: Any, data: bytes) -> bool:
    """Bytes that end inside a character may go on if one of the characters they begin does."""
    for cut in range(4):
        head, tail = data[: len(data) - cut], data[len(data) - cut :]
        try:
            text = head.decode()
        except UnicodeDecodeError:
            continue
        if not tail:
            return compiled.fullmatch(text, partial=True) is not None
        return any(
            char.encode().startswith(tail)
            and compiled.fullmatch(text + char, partial=True) is not None
            for char in "日本ภาษ"
        )
    return False


CHOICES = ["yes", "yes sir", "no", "no way!", '"quoted"\\', "maybe"]


def test_choices(chars: Vocabulary) -> None:
    for text in CHOICES:
        matcher = chars.start(choice=CHOICES)
        for at, char in enumerate(text):
            longer = {c[at] for c in CHOICES if c.startswith(text[:at]) and len(c) > at}
            want = {ord(c) - 32 for c in longer} | ({END} if text[:at] in CHOICES else set())
            assert chars.allowed(matcher) == want
            assert not matcher.finished
            matcher.commit(ord(char) - 32)
        assert matcher.finished == (not any(c != text and c.startswith(text) for c in CHOICES))


def test_thousands_of_choices(chars: Vocabulary) -> None:
    choices = [f"{n:05}" for n in range(0, 15000, 3)]
    matcher = chars.start(choice=choices)
    for char in "1499":
        matcher.commit(ord(char) - 32)
    assert chars.allowed(matcher) == {ord(c) - 32 for c in "0123456789" if int(f"1499{c}") % 3 == 0}


def test_padding_is_never_allowed_and_every_end_is() -> None:
    vocabulary = Vocabulary(char_tokenizer(), padding=100)
    vocabulary.compiler = GrammarCompiler(lambda: CHARS, vocabulary.size, (END, 96))
    matcher = vocabulary.start(regex="[ -~]*")
    assert vocabulary.allowed(matcher) == set(range(97))
    matcher.commit(96)
    assert matcher.finished and not matcher.error


LARK = """
start: greeting " " NAME ("," " " NAME)*
greeting: "hello" | "bye"
NAME: /[A-Z][a-z]+/
"""
GBNF = """
root ::= expr
expr ::= term ("+" term)*
term ::= num | "(" expr ")"
num ::= [0-9]+
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (LARK, ["hello Ann", "bye Bob, Ann, Cy"], ["hello ann", "hi Ann", "hello Ann,Bob"]),
        (GBNF, ["1", "(1+2)+34", "((7))"], ["+1", "(1", "1++2", "1)"]),
        ('start: "a" %json {"type": "integer"} "b"', ["a12b", "a-3b"], ["ab", 'a"1"b', "a1.5b"]),
    ],
)
def test_grammars(chars: Vocabulary, grammar: str, good: list[str], bad: list[str]) -> None:
    for text in good + bad:
        matcher = chars.start(grammar=grammar)
        fits = chars.walk(matcher, text)
        complete = fits and (matcher.finished or END in chars.allowed(matcher))
        assert complete == (text in good), text


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}},
     "required": ["a", "n"], "additionalProperties": False},
    {"type": "object", "properties": {"x": {"type": "number", "minimum": 0, "maximum": 10}},
     "required": ["x"]},
    {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": {"k": [1, "two"]}}]},
    {"$ref": "#/$defs/node", "$defs": {"node": {
        "type": "object", "properties": {"v": {"type": "integer"},
                                         "next": {"anyOf": [{"$ref": "#/$defs/node"},
                                                            {"type": "null"}]}},
        "required": ["v", "next"], "additionalProperties": False}}},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    {"type": "object", "patternProperties": {"^x[0-9]+$": {"type": "boolean"}},
     "additionalProperties": False, "minProperties": 1},
]  # fmt: skip


def random_text(vocabulary: Vocabulary, matcher: Matcher, seed: int) -> str | None:
    """A text of allowed tokens, closing what it can more often than not; None: it didn't end."""
    rng = random.Random(seed)
    text = ""
    for _ in range(400):
        allowed = vocabulary.allowed(matcher)
        if END in allowed and rng.random() < 0.5:
            return text
        closers = [t for t in allowed if t < 95 and chr(32 + t) in '"}]n']
        letters = sorted(allowed - {END})
        token = rng.choice(sorted(closers) if closers and rng.random() < 0.4 else letters)
        matcher.commit(token)
        assert not matcher.error
        text += chr(32 + token)
        if matcher.finished:
            return text
    return None


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
@pytest.mark.parametrize("blanks", [True, False])
def test_whatever_a_schema_lets_through_validates(
    chars: Vocabulary, schema: dict[str, Any], blanks: bool
) -> None:
    ended = 0
    for seed in range(30):
        matcher = chars.start(json=schema, disable_any_whitespace=not blanks)
        text = random_text(chars, matcher, seed)
        if text is not None:
            ended += 1
            jsonschema.validate(json.loads(text), schema)
            assert blanks or text == text.strip()
    assert ended >= 10


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (SCHEMAS[0], [{"a": "", "n": 0}, {"a": "x y", "n": -12}]),
        (SCHEMAS[1], [{"x": 0}, {"x": 9.5}, {"x": 10}]),
        (SCHEMAS[2], [["red"], [3, None, "green"]]),
        (SCHEMAS[3], [True, None, {"k": [1, "two"]}]),
        (SCHEMAS[4], [{"v": 1, "next": {"v": 2, "next": {"v": 3, "next": None}}}]),
        (SCHEMAS[5], ["AB-123"]),
        (SCHEMAS[7], [{"q": 1, "w": 2}]),
        (SCHEMAS[8], [{"x1": True, "x22": False}]),
        ({"type": "string", "format": "date"}, ["2024-02-29"]),
        ({}, [1, "x", [], {"a": [None, True]}]),
    ],
)
def test_a_schema_lets_its_instances_through(
    chars: Vocabulary, schema: dict[str, Any], values: list[Any]
) -> None:
    for value in values:
        jsonschema.validate(value, schema)
        for text in (json.dumps(value), json.dumps(value, separators=(",", ":"))):
            matcher = chars.start(json=json.dumps(schema))
            assert chars.walk(matcher, text), text
            assert matcher.finished or END in chars.allowed(matcher)


def test_json_object_is_any_object_and_nothing_else(chars: Vocabulary) -> None:
    assert chars.allowed(chars.start(json_object=True)) == {ord("{") - 32}
    matcher = chars.start(json_object=True)
    assert chars.walk(matcher, '{"a": {"b": [1, 2, {"c": null}]}, "d": -1.5e3}')
    assert matcher.finished


def test_blanks_in_json_are_bounded_unless_asked_otherwise(chars: Vocabulary) -> None:
    def fits(blanks: int, **options: Any) -> bool:
        return chars.walk(chars.start(json_object=True, **options), "{" + " " * blanks + '"a"')

    assert fits(64) and not fits(65)
    assert fits(500, whitespace_pattern="[ ]*")
    assert fits(2, whitespace_pattern=" {0,2}") and not fits(3, whitespace_pattern=" {0,2}")
    assert fits(0, disable_any_whitespace=True) and not fits(1, disable_any_whitespace=True)
    own = {"type": "object", "x-guidance": {"whitespace_flexible": False}}
    assert chars.walk(chars.start(json=own), '{"a":') and not chars.walk(
        chars.start(json=own), '{ "a":'
    )


def test_objects_are_closed_where_asked(chars: Vocabulary) -> None:
    schema = {
        "type": "object",
        "properties": {
            "in": {"type": "object", "properties": {"a": {"type": "integer"}}},
            "open": {"type": "object", "additionalProperties": True},
        },
    }
    inner = '{"in":{"a":1,"z":2}}'
    assert chars.walk(chars.start(json=schema), inner)
    assert not chars.walk(chars.start(json=schema, disable_additional_properties=True), inner)
    free = '{"open":{"z":2}}'
    assert chars.walk(chars.start(json=schema, disable_additional_properties=True), free)


TAG = {
    "structures": [
        {"begin": "<fn=add>", "schema": {"type": "array", "items": {"type": "integer"},
                                         "minItems": 2, "maxItems": 2}, "end": "</fn>"},
        {"begin": "<fn=now>", "schema": {"type": "object", "maxProperties": 0}, "end": "</fn>"},
    ],
    "triggers": ["<fn="],
}  # fmt: skip


@pytest.mark.parametrize("form", [TAG, json.dumps(TAG)])
def test_a_structural_tag_binds_only_after_its_trigger(chars: Vocabulary, form: Any) -> None:
    good = ["plain < text > fn=", "so <fn=add>[1, 22]</fn> and <fn=now>{}</fn>.", ""]
    bad = ["<fn=sub>", "<fn=add>[1]</fn>", "<fn=add>[1, 2]</gn>"]
    for text in good + bad:
        matcher = chars.start(structural_tag=form)
        assert chars.walk(matcher, text) == (text in good), text
    matcher = chars.start(structural_tag=form)
    assert chars.walk(matcher, "x <fn=add>[1,")
    assert END not in chars.allowed(matcher)


def test_matchers_of_one_grammar_are_apart(chars: Vocabulary) -> None:
    grammar = chars.compiler.compile(StructuredOutputs(regex="ab|cd"))
    first, second = grammar.matcher(), grammar.matcher()
    first.commit(ord("a") - 32)
    assert chars.allowed(second) == {ord("a") - 32, ord("c") - 32}
    assert chars.allowed(first) == {ord("b") - 32}


def test_a_token_that_was_not_allowed_is_an_error(chars: Vocabulary) -> None:
    matcher = chars.start(regex="ab")
    matcher.commit(ord("z") - 32)
    assert matcher.finished and "\n" not in matcher.error and matcher.error
    words = np.full(mask_words(97), -1, np.int32)
    matcher.fill(words)
    assert not words.any()

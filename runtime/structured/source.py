"""From StructuredOutputs to a grammar as llguidance reads it, with limits on its size.

Contract: what comes back is text that llguidance may still refuse, never a wider grammar than was
asked for: a keyword that it doesn't implement is its error, not left out.
"""

import re
from typing import Any

import msgspec

from ropeway.compiler.errors import RequestError
from ropeway.runtime.sampling.structured import FIELD, StructuredOutputs

# In bytes. llguidance bounds what it makes of them (`limits` in grammar.py), but reads them whole.
MAX_SOURCE = {
    "json": 256 << 10,
    "structural_tag": 256 << 10,
    "choice": 256 << 10,
    "grammar": 128 << 10,
    "regex": 32 << 10,
    "whitespace_pattern": 1 << 10,
}
MAX_NESTING = 100  # of a schema; llguidance's own reader ends at 128
# A model that once began to write blanks may never stop: JSON's are bounded unless asked otherwise.
_BLANKS = r"[ \t\n\r]{0,64}"
_MAX_MESSAGE = 300


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    schema: dict[str, Any] | bool = True
    end: str = ""


class _StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    structures: list[_Structure]
    triggers: list[str]
    type: str = "structural_tag"


def grammar_source(structured: StructuredOutputs) -> str:
    """The grammar's text. Raises RequestError, naming the field, for one that is too large or whose
    form is wrong."""
    kind = structured.kind
    for name in ("regex", "grammar", "whitespace_pattern"):
        _check_text(name, getattr(structured, name) or "")
    if kind == "json":
        return _json(_schema_of(structured.json), structured)
    if kind == "json_object":
        return _json({"type": "object"}, structured)
    if kind == "structural_tag":
        return _structural_tag(structured.structural_tag)
    # Light modules do without these imports, which take 40 ms.
    import json  # noqa: PLC0415

    from llguidance import LLMatcher, grammar_from  # noqa: PLC0415

    if kind == "regex":
        return LLMatcher.grammar_from_regex(str(structured.regex))
    if kind == "grammar":
        try:
            return grammar_from("grammar", str(structured.grammar))
        except ValueError as error:
            raise refusal("grammar", str(error)) from error
    texts = [json.dumps(text) for text in structured.choice or ()]
    source = " | ".join(texts)
    _check_text("choice", source)
    # One terminal: as rules, thousands of texts are more items than a parser row may hold.
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {source}")


def refusal(kind: str, message: str) -> RequestError:
    """The error for a `kind` that llguidance refuses, with its own words in one line."""
    lines = message.split("\n<", 1)[0].splitlines()  # what follows is the parser's state
    said = [line for line in lines if not re.fullmatch(r"\s*\d+ \| .*|[\s^]*", line)]
    text = " ".join(" ".join(said).split())
    if text.startswith("NoExtension"):
        text = "no text matches it"
    if len(text) > _MAX_MESSAGE:
        text = f"{text[: _MAX_MESSAGE // 2]} ... {text[-_MAX_MESSAGE // 2 :]}"
    return RequestError(f"{FIELD}.{kind}", text)


def _json(schema: dict[str, Any], structured: StructuredOutputs) -> str:
    from llguidance import LLMatcher  # noqa: PLC0415

    if structured.disable_additional_properties:
        schema = _closed(schema)
    text = _encode("json", schema)
    own = schema.get("x-guidance")
    inflexible = isinstance(own, dict) and own.get("whitespace_flexible") is False
    if structured.disable_any_whitespace:
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    if structured.whitespace_pattern is not None:
        return LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_pattern": structured.whitespace_pattern}
        )
    return LLMatcher.grammar_from_json_schema(
        text, defaults={} if inflexible else {"whitespace_pattern": _BLANKS}
    )


def _schema_of(given: Any) -> dict[str, Any]:
    if not isinstance(given, str):
        _check_nesting("json", given)
        return dict(given)
    _check_text("json", given)
    schema = _decode("json", given)
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{FIELD}.json", f"a schema is an object, not {type(schema).__name__}")
    if schema is False:
        raise RequestError(f"{FIELD}.json", "no text matches the schema false")
    _check_nesting("json", schema)
    return {} if schema is True else schema


def _structural_tag(given: Any) -> str:
    import json  # noqa: PLC0415

    from llguidance import LLMatcher, StructTag  # noqa: PLC0415

    if isinstance(given, str):
        _check_text("structural_tag", given)
        given = _decode("structural_tag", given)
    _check_nesting("structural_tag", given)
    _encode("structural_tag", given)
    try:
        tag = msgspec.convert(given, _StructuralTag)
    except msgspec.ValidationError as error:
        raise RequestError(f"{FIELD}.structural_tag", str(error)) from error
    if not tag.structures:
        raise RequestError(f"{FIELD}.structural_tag", "structures is empty: give at least one")
    tags = []
    for index, one in enumerate(tag.structures):
        trigger = next((t for t in tag.triggers if t and one.begin.startswith(t)), None)
        if trigger is None:
            raise RequestError(
                f"{FIELD}.structural_tag",
                f"structures[{index}].begin {one.begin[:40]!r} starts with none of the triggers",
            )
        schema = json.dumps(one.schema if isinstance(one.schema, dict) else {})
        tags.append(StructTag(trigger=trigger, begin=one.begin, grammar=schema, end=one.end))
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))


def _closed(schema: Any) -> Any:
    """The schema with every object closed that doesn't say itself what more it takes."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    if schema.get("type") == "object" and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


def _check_nesting(name: str, value: Any) -> None:
    """Raises RequestError for a value so deep that nothing after this could walk it."""
    level = [value]
    for _ in range(MAX_NESTING):
        level = [
            part
            for outer in level
            if isinstance(outer, dict | list | tuple)
            for part in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise RequestError(f"{FIELD}.{name}", f"nested deeper than {MAX_NESTING} levels")


def _check_text(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{FIELD}.{name}", f"must be Unicode text: {error}") from error
    if size > MAX_SOURCE[name]:
        raise RequestError(
            f"{FIELD}.{name}", f"{size} bytes are too large: at most {MAX_SOURCE[name]}"
        )


def _encode(name: str, value: Any) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise RequestError(f"{FIELD}.{name}", f"can't be written as JSON: {error}") from error
    _check_text(name, text)
    return text


def _decode(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise RequestError(f"{FIELD}.{name}", f"isn't JSON: {error}") from error

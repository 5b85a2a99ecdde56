"""Pieces of grammars in llguidance's notation."""

import json
import re
from collections.abc import Mapping
from typing import Any

from ropeway.runtime.sampling.structured import StructuredOutputs
from ropeway.runtime.text.tokenizer import Tokenizer
from ropeway.serving.parsing.markers import special_id

_MARKER = re.compile(r"(</?\w+>|<\|\w+\|>|\[[A-Z_]+\])")


def literal(text: str, tokenizer: Tokenizer) -> str:
    """`text` as a part of a rule; special tokens in it are given by their ids, as text they
    couldn't be written."""
    parts = []
    plain = ""
    for piece in _MARKER.split(text):
        token = special_id(tokenizer, piece) if _MARKER.fullmatch(piece) else None
        if token is None:
            plain += piece
            continue
        parts += [json.dumps(plain), f"<[{token}]>"] if plain else [f"<[{token}]>"]
        plain = ""
    if plain:
        parts.append(json.dumps(plain))
    return " ".join(parts)


def json_rule(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """JSON of a schema; `options` say what space there may be."""
    return f"%json {json.dumps({'x-guidance': options, **schema})}"


def embedded(structured: StructuredOutputs) -> str:
    """What a request asks of a text, as a part of a larger grammar."""
    from ropeway.runtime.structured.source import grammar_source  # noqa: PLC0415 (slow to import)

    source = grammar_source(structured)
    if not source.startswith("{"):
        return _nested(source)
    [grammar] = json.loads(source)["grammars"]
    schema = grammar.get("json_schema")
    return _nested(grammar["lark_grammar"]) if schema is None else f"%json {json.dumps(schema)}"


def _nested(lark: str) -> str:
    return f"%lark {{\n{lark.removeprefix('%llguidance {}')}\n}}"

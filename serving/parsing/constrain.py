"""The form of an answer: calls that a request insists on, and what it asks of the text, behind the
thinking of a model that thinks.

Contract: the calls that are made here are read as such by the parser of the format. Where the model
is free to call (tool_choice "auto") it may write anything, except that a call of Hermes' format
then follows the functions' schemas if one of them is strict. In the other formats "strict" binds
only calls that a request insists on; their arguments always follow the schema.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ropeway.compiler.errors import RequestError
from ropeway.runtime.sampling.structured import StructuredOutputs
from ropeway.runtime.text.tokenizer import Tokenizer
from ropeway.serving.openai.messages import FunctionDefinition
from ropeway.serving.parsing import hermes, llama3_json, reasoning
from ropeway.serving.parsing.choose import ChatFormat
from ropeway.serving.parsing.grammar_text import embedded, json_rule, literal
from ropeway.serving.parsing.markers import special_id
from ropeway.serving.parsing.tools import ToolUse

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# A space or none: models were shown one, and a model that may write more might not stop.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_CACHED_CHECKS = 256
_HEAD = "%llguidance {}"  # what tells this notation from others


def constraint(
    form: ChatFormat,
    use: ToolUse,
    tokenizer: Tokenizer,
    prompt_end: str,
    asked: StructuredOutputs | None = None,
) -> StructuredOutputs | None:
    """What the text must look like; None where the model is free. `asked` is what the request wants
    of the text itself, `prompt_end` as in `make_parser`. Slow: for a thread.

    Raises RequestError for what can't be compiled, and where a call is insisted on beside `asked`.
    """
    if asked is not None:
        if use.mode == "required":
            raise RequestError("tool_choice", "contradicts response_format: the answer is a call")
        _check(asked)
    if use.mode == "none" or (use.mode == "auto" and asked is None):
        if asked is None:
            return _strict_calls(form, use, tokenizer)
        if form.reasoning == "none":
            return asked
    rules = [_HEAD, *_beginning(form, tokenizer, prompt_end)]
    if asked is not None:
        rules.append(f"asked: {embedded(asked)}")
    if use.mode != "none":
        rules += _calls(form, use, tokenizer, marked=asked is not None)
    answers = [name for name, wanted in (("asked", asked), ("calls", use.tools)) if wanted]
    rules.append(f"answer: {' | '.join(answers)}")
    made = StructuredOutputs(grammar="\n".join(rules))
    if use.mode != "none":
        _check_calls(made, use)
    return made


def _beginning(form: ChatFormat, tokenizer: Tokenizer, prompt_end: str) -> list[str]:
    """The rules of what comes before the answer: thinking, which the prompt may have begun."""
    if form.reasoning == "none":
        return ["start: answer"]
    close = reasoning.CLOSE.text
    if special_id(tokenizer, close) is None:
        thoughts = [f"thoughts[suffix={json.dumps(close)}]: /(?s:.*)/"]
    else:
        thoughts = [f"thoughts: /(?s:.*)/ {literal(close, tokenizer)}"]
    if reasoning.is_open(prompt_end):
        return [r"start: thoughts /\s{0,8}/ answer", *thoughts]
    opening = literal(reasoning.OPEN.text, tokenizer)
    return [rf"start: ({opening} thoughts /\s{{0,8}}/)? answer", *thoughts]


def _calls(form: ChatFormat, use: ToolUse, tokenizer: Tokenizer, *, marked: bool) -> list[str]:
    """The rules of calls as the format has them; with `marked` they begin unlike any JSON."""
    shape = form.shape
    if marked and form.tools == "llama3_json":
        shape = replace(shape, begin=llama3_json.TAG.text)
    functions = [tool.function for tool in use.callable_tools]
    begin, end = literal(shape.begin, tokenizer), literal(shape.end, tokenizer)
    more = "" if use.single else f" ({literal(shape.between, tokenizer)} call)*"
    rules = [f"calls: {begin} call{more} {end}"]
    rules.append(f"call: {' | '.join(f'call_{index}' for index in range(len(functions)))}")
    for index, function in enumerate(functions):
        head = literal(f"{shape.head}{function.name}{shape.middle}", tokenizer)
        tail = literal(shape.tail, tokenizer)
        rules.append(f"call_{index}: {head} arguments_{index} {tail}")
        rules.append(f"arguments_{index}: {json_rule(_schema(function), _SPACING)}")
    return rules


def _schema(function: FunctionDefinition) -> Mapping[str, Any]:
    """The schema of a function's arguments. One that doesn't say what it makes of other names than
    those it lists takes none: a call with them would fail at the caller's."""
    schema = function.parameters
    if not schema:
        return _NO_ARGUMENTS
    closed = {"type": "object", **schema}
    others = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if", "not")
    if "properties" in schema and not any(name in schema for name in others):
        closed.setdefault("additionalProperties", False)
    return closed


def _strict_calls(form: ChatFormat, use: ToolUse, tokenizer: Tokenizer) -> StructuredOutputs | None:
    """Free text in which a call's marker begins a call that follows its schema."""
    marked = form.tools == "hermes" and special_id(tokenizer, hermes.OPEN.text) is None
    if not marked or not any(tool.function.strict for tool in use.tools):
        return None
    shape = form.shape
    structures = [
        {
            "begin": f"{shape.head}{tool.function.name}{shape.middle}",
            "schema": dict(_schema(tool.function)),
            "end": shape.tail,
        }
        for tool in use.tools
    ]
    made = StructuredOutputs(
        structural_tag={"structures": structures, "triggers": [hermes.OPEN.text]}
    )
    _check_calls(made, use)
    return made


def _check_calls(made: StructuredOutputs, use: ToolUse) -> None:
    """Raises RequestError that names the function whose parameters can't be compiled."""
    try:
        _check(made)
    except RequestError as error:
        field = "functions" if use.legacy else "tools"
        for tool in use.callable_tools:
            try:
                _check(StructuredOutputs(json=dict(_schema(tool.function))))
            except RequestError as fault:
                name = tool.function.name
                raise RequestError(field, f"parameters of {name!r}: {fault.reason}") from fault
        raise RequestError(field, f"together they are too much: {error.reason}") from error


def _check(structured: StructuredOutputs) -> None:
    """Whether it can be compiled at all; what was found in order before isn't tried again."""
    _checked(msgspec.json.encode(structured))


@functools.lru_cache(_CACHED_CHECKS)
def _checked(encoded: bytes) -> None:
    from ropeway.runtime.structured.check import check_structured  # noqa: PLC0415 (slow to import)

    check_structured(msgspec.json.decode(encoded, type=StructuredOutputs))

"""OpenAI's chat messages and tools, as chat templates take them.

Contract: a template gets a call's arguments as an object, and what it knows no place for as text: a
model whose template doesn't know tools is told of them in the system message, and reads calls and
results in the messages.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ropeway.compiler.errors import RequestError
from ropeway.serving.openai.messages import Message, RefusalPart, TextPart, Tool, ToolCall
from ropeway.serving.parsing.choose import ChatFormat
from ropeway.serving.parsing.spell_out import spell_out_calls, spell_out_tools
from ropeway.serving.parsing.tools import ToolUse

_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")


def template_messages(
    messages: Sequence[Message], form: ChatFormat, use: ToolUse
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages and the tools to render. Raises RequestError that names the path."""
    if use.mode != "none" and form.tools == "none":
        raise RequestError(
            "tools",
            "this model's chat template writes calls in a way that no parser here reads: "
            "leave tools out, or start the server with --tool-call-parser",
        )
    lowered: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the functions that were called, by the calls' ids
    for index, message in enumerate(messages):
        made = _message(message, f"messages[{index}]", names, form)
        lowered.append(made)
    if not form.reads_calls:
        lowered = spell_out_calls(lowered, form.shape)
    if not use.tools:
        return lowered, None
    tools = [_tool(tool) for tool in use.tools]
    if form.reads_tools:
        return lowered, tools
    return spell_out_tools(lowered, tools, form.shape), None


def _message(
    message: Message, path: str, names: dict[str, str], form: ChatFormat
) -> dict[str, Any]:
    role = _role(message.role, form)
    made: dict[str, Any] = {"role": role}
    calls = _calls(message, path, form)
    if calls and role != "assistant":
        raise RequestError(f"{path}.tool_calls", f"only an assistant calls, not {role!r}")
    made["content"] = _content(message, path, optional=bool(calls))
    if message.name is not None:
        made["name"] = message.name
    if role == "tool":
        _add_result(made, message, path, names, form)
    if role == "assistant":
        thinking = message.reasoning_content or message.reasoning
        if thinking:
            made["reasoning_content"] = thinking
    if calls:
        made["tool_calls"] = calls
        names.update({call["id"]: call["function"]["name"] for call in calls})
    return made


def _role(role: str, form: ChatFormat) -> str:
    if role == "developer" and not form.reads_developer:
        return "system"
    return "tool" if role == "function" else role  # as results of functions were sent once


def _content(message: Message, path: str, *, optional: bool) -> str | list[dict[str, str]]:
    """Text, or parts of text for the templates that read them."""
    content = message.content
    if content is None and message.refusal is not None:
        return message.refusal
    if content is None:
        if optional:
            return ""  # what templates join to something
        raise RequestError(f"{path}.content", "is missing")
    if isinstance(content, str):
        return content
    if not content:
        raise RequestError(f"{path}.content", "the list is empty: give at least one part")
    return [
        {"type": "text", "text": _part_text(part, f"{path}.content[{k}]")}
        for k, part in enumerate(content)
    ]


def _part_text(part: object, path: str) -> str:
    if isinstance(part, TextPart):
        return part.text
    if isinstance(part, RefusalPart):
        return part.refusal
    raise RequestError(path, "this model reads text only: give parts of type 'text'")


def _add_result(
    made: dict[str, Any], message: Message, path: str, names: Mapping[str, str], form: ChatFormat
) -> None:
    """A tool's result: the call that it belongs to, and that call's function."""
    if message.role == "function":
        if message.name is None:
            raise RequestError(f"{path}.name", "is missing: the function whose result this is")
        return
    if message.tool_call_id is None:
        raise RequestError(f"{path}.tool_call_id", "is missing: the call whose result this is")
    made["tool_call_id"] = _call_id(message.tool_call_id, form)
    name = names.get(made["tool_call_id"])
    if name is not None:
        made.setdefault("name", name)


def _calls(message: Message, path: str, form: ChatFormat) -> list[dict[str, Any]]:
    if message.function_call is not None:
        if message.tool_calls:
            raise RequestError(f"{path}.function_call", "contradicts tool_calls: keep one")
        return [_legacy_call(message.function_call, f"{path}.function_call", form)]
    return [
        _call(call, f"{path}.tool_calls[{index}]", index, form)
        for index, call in enumerate(message.tool_calls or ())
    ]


def _call(call: ToolCall, path: str, index: int, form: ChatFormat) -> dict[str, Any]:
    arguments = _arguments(call.function.arguments, f"{path}.function.arguments")
    return {
        "id": _call_id(call.id or f"call_{index}", form),
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _legacy_call(given: Mapping[str, Any], path: str, form: ChatFormat) -> dict[str, Any]:
    for key in ("name", "arguments"):
        if not isinstance(given.get(key), str):
            raise RequestError(f"{path}.{key}", "must be a string")
    arguments = _arguments(given["arguments"], f"{path}.arguments")
    function = {"name": given["name"], "arguments": arguments}
    return {"id": _call_id("call_0", form), "type": "function", "function": function}


def _arguments(text: str, path: str) -> dict[str, Any]:
    """The object that a call's arguments are; "" is none."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise RequestError(path, f"must be JSON text: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(path, "must be the JSON text of an object")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} isn't JSON")


def _call_id(call_id: str, form: ChatFormat) -> str:
    """Mistral's templates refuse ids of other lengths, which other servers give out."""
    if form.tools != "mistral" or _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _tool(tool: Tool) -> dict[str, Any]:
    """What a model is shown of a tool."""
    function = tool.function
    shown = {
        "name": function.name,
        "description": function.description or "",  # which some templates join to a text
        "parameters": function.parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": shown}

"""Tools, calls and results as text, for a chat template that knows no place for them."""

from collections.abc import Mapping, Sequence
from typing import Any

from ropeway.serving.parsing.call_shape import CallShape, to_json

Messages = list[dict[str, Any]]


def spell_out_tools(
    messages: Messages, tools: Sequence[Mapping[str, Any]], shape: CallShape
) -> Messages:
    """The messages, the first of which is then the system's and tells of the tools."""
    listed = "\n".join(to_json(tool["function"]) for tool in tools)
    example = f"{shape.begin}{shape.call('NAME', '{...}')}{shape.end}"
    told = (
        "You can call functions. These are their definitions, with JSON schemas of their "
        f"parameters:\n<tools>\n{listed}\n</tools>\n"
        f"To call a function, answer with its name and an object of its arguments, like this:\n"
        f"{example}"
    )
    if not messages or messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": told}, *messages]
    first = messages[0]
    return [{**first, "content": f"{_text(first['content'])}\n\n{told}".lstrip()}, *messages[1:]]


def spell_out_calls(messages: Messages, shape: CallShape) -> Messages:
    """The messages with calls as text of the assistant and results as a user's message, one for
    the results of all calls that were made together."""
    spelled: Messages = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{_text(message['content'])}\n</tool_response>"
            if spelled and spelled[-1].get("results"):
                spelled[-1]["content"] += f"\n{result}"
            else:
                spelled.append({"role": "user", "content": result, "results": True})
            continue
        spelled.append(_with_calls(message, shape) if "tool_calls" in message else message)
    return [{k: v for k, v in message.items() if k != "results"} for message in spelled]


def _with_calls(message: Mapping[str, Any], shape: CallShape) -> dict[str, Any]:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = shape.text([(function["name"], function["arguments"]) for function in functions])
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{_text(message['content'])}\n{calls}".lstrip()}


def _text(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)

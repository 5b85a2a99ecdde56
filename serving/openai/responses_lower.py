"""From a request for a response to the chat request that is the same, and back for its errors."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ropeway.compiler.errors import RequestError
from ropeway.serving.errors import ApiError, from_request_error
from ropeway.serving.http.context import ServerContext
from ropeway.serving.openai import fields as chat_fields
from ropeway.serving.openai import messages as chat
from ropeway.serving.openai.decoding import decode_request
from ropeway.serving.openai.responses_fields import (
    OTHER_ITEMS,
    OTHER_PARTS,
    OTHER_TOOLS,
    REFUSED,
    AllowedToolsChoice,
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionChoice,
    JsonObjectFormat,
    JsonSchemaFormat,
    MessageItem,
    Part,
    ReasoningItem,
    Refusal,
    ResponsesRequest,
)

_LOGPROBS = "message.output_text.logprobs"
_SAME_NAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "structured_outputs",
    "chat_template_kwargs",
    "priority",
    "cache_salt",
)
_RENAMED = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
}
_MESSAGE = re.compile(r"^messages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function)?)?")
_NESTED = re.compile(r"\.(?:function|allowed_tools|json_schema)(?=\.|\[|$)")  # flat in a response


@dataclass(slots=True)
class Lowered:
    """A chat request, and where its messages come from: for each message the path of its item, and
    those of its calls."""

    request: chat.ChatRequest
    paths: list[str] = field(default_factory=list)
    calls: dict[tuple[int, int], str] = field(default_factory=dict)

    def in_callers_words(self, error: ApiError | RequestError) -> ApiError:
        """An error about the chat request as one about the response's."""
        found = from_request_error(error) if isinstance(error, RequestError) else error
        param = found.param
        if param is None:
            return found
        renamed = self._path(param)
        message = found.message
        if message.startswith(param):
            message = renamed + message[len(param) :]
        return ApiError(
            found.status,
            message.replace("max_completion_tokens", "max_output_tokens"),
            kind=found.kind,
            param=renamed,
            code=found.code,
            headers=found.headers,
        )

    def _path(self, param: str) -> str:
        message = _MESSAGE.match(param)
        if message is not None:
            index = int(message[1])
            path = self.paths[index] if index < len(self.paths) else "input"
            if message[2] is not None:
                path = self.calls.get((index, int(message[2])), path)
            if path in ("input", "instructions"):  # a text, which has no fields
                return path
            return path + param[message.end() :]
        if param.startswith(("tools", "tool_choice", "response_format")):
            param = _NESTED.sub("", param)
        head, dot, rest = param.partition(".")
        return _RENAMED.get(head, head) + dot + rest


def decode_response_request(body: bytes, context: ServerContext) -> ResponsesRequest:
    """The request in `body`. Raises ApiError 400, with the path of what is wrong."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if isinstance(value, dict):
        _check_types(value)
        if _add_types(value):
            body = msgspec.json.encode(value)
    request = decode_request(body, ResponsesRequest, context)
    for name, why in REFUSED.items():
        if getattr(request, name) not in (None, False):
            raise ApiError(400, f"{name}: {why}", param=name, code="unsupported_parameter")
    return request


def _check_types(value: Mapping[str, Any]) -> None:
    """Names the kinds of items, parts and tools that OpenAI knows and that aren't served."""
    items = value.get("input")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        _refuse_type(
            item,
            OTHER_ITEMS,
            f"input[{index}]",
            "only messages, functions' calls, their outputs and reasoning can be served",
        )
        for name in ("content", "output"):
            parts = item.get(name) if isinstance(item, dict) else None
            for k, part in enumerate(parts if isinstance(parts, list) else ()):
                _refuse_type(
                    part, OTHER_PARTS, f"input[{index}].{name}[{k}]", "this model reads text only"
                )
    tools = value.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        _refuse_type(tool, OTHER_TOOLS, f"tools[{index}]", "only functions can be served")
    _refuse_type(
        value.get("tool_choice"), OTHER_TOOLS, "tool_choice", "only functions can be served"
    )


def _refuse_type(value: Any, others: frozenset[str], path: str, why: str) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in others:
        raise ApiError(
            400, f"{path}.type: {kind!r}: {why}", param=f"{path}.type", code="unsupported_value"
        )


def _add_types(value: Mapping[str, Any]) -> bool:
    """Messages may leave their type out; whether one did."""
    items = value.get("input")
    bare = [
        item
        for item in (items if isinstance(items, list) else ())
        if isinstance(item, dict) and "type" not in item
    ]
    for item in bare:
        item["type"] = "message"
    return bool(bare)


def lower(request: ResponsesRequest) -> Lowered:
    """The chat request. Raises ApiError or RequestError with the path in `request`."""
    asks = _LOGPROBS in (request.include or ())
    if request.top_logprobs and not asks:
        why = f"only with {_LOGPROBS!r} in include"
        raise ApiError(400, f"top_logprobs: {why}", param="top_logprobs")
    effort = request.reasoning.effort if request.reasoning else None
    lowered = Lowered(
        chat.ChatRequest(
            messages=[],
            max_completion_tokens=request.max_output_tokens,
            logprobs=asks or None,
            top_logprobs=request.top_logprobs,
            tools=_tools(request),
            tool_choice=_choice(request),
            response_format=_format(request),
            reasoning_effort=effort,
            **{name: getattr(request, name) for name in _SAME_NAME},
        )
    )
    if request.instructions is not None:
        _add(lowered, "instructions", chat.Message(role="system", content=request.instructions))
    if isinstance(request.input, str):
        _add(lowered, "input", chat.Message(role="user", content=request.input))
        return lowered
    if not request.input:
        raise RequestError("input", "the list is empty: give at least one item")
    thoughts = ""
    for index, item in enumerate(request.input):
        thoughts = _lower_item(lowered, item, f"input[{index}]", thoughts)
    return lowered


def _add(lowered: Lowered, path: str, message: chat.Message) -> None:
    lowered.request.messages.append(message)
    lowered.paths.append(path)


def _lower_item(lowered: Lowered, item: Any, path: str, thoughts: str) -> str:
    """Adds an item; the thinking that the next message of the assistant begins with."""
    if isinstance(item, ReasoningItem):
        return thoughts + "".join(part.text for part in item.content or item.summary)
    if isinstance(item, FunctionCallOutputItem):
        made = chat.Message(role="tool", content=_content(item.output), tool_call_id=item.call_id)
        _add(lowered, path, made)
        return thoughts
    if isinstance(item, MessageItem):
        message = chat.Message(role=item.role, content=_content(item.content))
        _add(lowered, path, message)
    else:
        message = _calling_message(lowered, path)
        _add_call(lowered, message, item, path)
    if message.role != "assistant":
        return thoughts
    if thoughts:
        message.reasoning_content = thoughts
    return ""


def _calling_message(lowered: Lowered, path: str) -> chat.Message:
    """The assistant's message that a call belongs to: the last one, or a new one."""
    messages = lowered.request.messages
    if not messages or messages[-1].role != "assistant":
        _add(lowered, path, chat.Message(role="assistant"))
    return messages[-1]


def _add_call(lowered: Lowered, message: chat.Message, item: FunctionCallItem, path: str) -> None:
    function = chat.CalledFunction(name=item.name, arguments=item.arguments)
    calls = message.tool_calls or []
    message.tool_calls = [*calls, chat.ToolCall(function=function, id=item.call_id)]
    lowered.calls[len(lowered.request.messages) - 1, len(calls)] = path


def _content(content: str | Sequence[Part]) -> str | list[chat.Part]:
    if isinstance(content, str):
        return content
    return [
        chat.TextPart(text=part.refusal if isinstance(part, Refusal) else part.text)
        for part in content
    ]


def _tools(request: ResponsesRequest) -> list[chat.Tool] | None:
    if request.tools is None:
        return None
    return [
        chat.Tool(
            function=chat.FunctionDefinition(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            )
        )
        for tool in request.tools
    ]


def _choice(request: ResponsesRequest) -> chat.ToolChoice | None:
    choice = request.tool_choice
    if isinstance(choice, FunctionChoice):
        return chat.NamedChoice(function=chat.FunctionName(name=choice.name))
    if isinstance(choice, AllowedToolsChoice):
        allowed = chat.AllowedTools(mode=choice.mode, tools=choice.tools)
        return chat.AllowedChoice(allowed_tools=allowed)
    return choice


def _format(request: ResponsesRequest) -> chat_fields.ResponseFormat | None:
    wanted = request.text.format if request.text else None
    if isinstance(wanted, JsonObjectFormat):
        return chat_fields.JsonObjectFormat()
    if isinstance(wanted, JsonSchemaFormat):
        schema = chat_fields.JsonSchema(
            name=wanted.name,
            description=wanted.description,
            schema=wanted.schema,
            strict=wanted.strict,
        )
        return chat_fields.JsonSchemaFormat(json_schema=schema)
    return None

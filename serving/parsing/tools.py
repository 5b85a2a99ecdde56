"""Which tools a request brings, and whether they may or must be called."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from ropeway.compiler.errors import RequestError
from ropeway.serving.openai.messages import (
    AllowedChoice,
    ChatRequest,
    FunctionDefinition,
    FunctionName,
    NamedChoice,
    Tool,
    ToolChoice,
)

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_TOOLS = 1024


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the model is told of, and what may become of them.

    `mode` "none": no call is looked for; "auto": the model decides; "required": it must call one of
    them, or the one called `name`. `parallel` False: one call at most. `legacy`: the request used
    `functions`, so that its answer has `function_call`.
    """

    tools: Sequence[Tool] = ()
    mode: Literal["none", "auto", "required"] = "none"
    name: str | None = None
    parallel: bool = True
    legacy: bool = False

    @property
    def single(self) -> bool:
        """Whether one call is the most that the answer may have."""
        return self.legacy or self.name is not None or not self.parallel

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """Those of the tools that a call may name."""
        return [tool for tool in self.tools if self.name in (None, tool.function.name)]


NO_TOOLS = ToolUse()


def tool_use(request: ChatRequest) -> ToolUse:
    """The tools of a chat request. Raises RequestError that names the path."""
    if request.functions is not None or request.function_call is not None:
        return _legacy_use(request)
    check_tools(request.tools or (), "tools[{}].function")
    return chosen_use(
        request.tools or (), request.tool_choice, request.parallel_tool_calls is not False
    )


def check_tools(tools: Sequence[Tool], path: str) -> None:
    """Raises RequestError, whose field begins with `path`, for a function that can't be offered."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(path.partition("[")[0], f"{len(tools)} tools: at most {MAX_TOOLS}")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        _check_function(tool.function, seen, path.format(index))
        seen.add(tool.function.name)


def chosen_use(
    tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool, path: str = "tool_choice"
) -> ToolUse:
    """What `choice` makes of tools that were checked. Raises RequestError with the path."""
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none" or (choice == "auto" and not tools):
        return NO_TOOLS
    if not tools:
        raise RequestError(path, "there is nothing to be called: give tools")
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        _check_known(name, tools, f"{path}.function.name")
        return ToolUse(tools, "required", name, parallel)
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        kept = _allowed(tools, allowed.tools, f"{path}.allowed_tools.tools")
        return ToolUse(kept, allowed.mode, None, parallel)
    return ToolUse(tools, choice, None, parallel)


def _check_function(function: FunctionDefinition, seen: Collection[str], path: str) -> None:
    if not _NAME.fullmatch(function.name):
        raise RequestError(f"{path}.name", "must be 1 to 64 of the characters a-z A-Z 0-9 _ -")
    if function.name in seen:
        raise RequestError(f"{path}.name", f"two functions are called {function.name!r}")
    if function.parameters is not None:
        _check_parameters(function.parameters, f"{path}.parameters")


def _check_parameters(schema: Mapping[str, Any], path: str) -> None:
    """Arguments are an object; finer faults show when the schema is compiled."""
    if schema.get("type", "object") != "object":
        raise RequestError(f"{path}.type", "must be 'object': arguments have names")
    if not isinstance(schema.get("properties", {}), Mapping):
        raise RequestError(f"{path}.properties", "must be an object of JSON schemas")
    for name, inner in schema.get("properties", {}).items():
        if not isinstance(inner, Mapping | bool):
            raise RequestError(f"{path}.properties.{name}", "must be a JSON schema")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(f"{path}.required", "must be a list of names")


def _check_known(name: str, tools: Sequence[Tool], path: str) -> None:
    names = [tool.function.name for tool in tools]
    if name not in names:
        listed = ", ".join(names)[:500] or "the request has none"
        raise RequestError(path, f"there is no function {name[:100]!r}: {listed}")


def _allowed(
    tools: Sequence[Tool], entries: Sequence[Mapping[str, Any]], path: str
) -> Sequence[Tool]:
    """The tools that `entries`, {"type": "function", "function": {"name"}} each, name."""
    names: set[str] = set()
    for index, entry in enumerate(entries):
        function = entry.get("function")
        name = function.get("name") if isinstance(function, Mapping) else entry.get("name")
        if entry.get("type") != "function" or not isinstance(name, str):
            raise RequestError(f"{path}[{index}]", "must name a function of tools")
        _check_known(name, tools, f"{path}[{index}].function.name")
        names.add(name)
    if not names:
        raise RequestError(path, "the list is empty: give at least one, or tool_choice 'none'")
    return [tool for tool in tools if tool.function.name in names]


def _legacy_use(request: ChatRequest) -> ToolUse:
    """`functions` and `function_call`, which tools have replaced."""
    for name in ("tools", "tool_choice"):
        if getattr(request, name) is not None:
            raise RequestError(name, "contradicts functions and function_call: keep one kind")
    try:
        functions = msgspec.convert(request.functions or [], list[FunctionDefinition])
    except msgspec.ValidationError as error:
        raise RequestError("functions", f"each must be a function's definition: {error}") from error
    tools = [Tool(function=function) for function in functions]
    check_tools(tools, "functions[{}]")
    return replace(chosen_use(tools, _legacy_choice(request, tools), False), legacy=True)


def _legacy_choice(request: ChatRequest, tools: Sequence[Tool]) -> ToolChoice | None:
    wanted = request.function_call
    if wanted is None:
        return None
    if wanted in ("none", "auto"):
        return "none" if wanted == "none" else "auto"
    name = wanted.get("name") if isinstance(wanted, dict) and len(wanted) == 1 else None
    if not isinstance(name, str):
        raise RequestError("function_call", "must be 'none', 'auto' or {\"name\": ...}")
    _check_known(name, tools, "function_call.name")
    return NamedChoice(function=FunctionName(name=name))

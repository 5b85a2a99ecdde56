"""Tools and tool_choice of a request."""

from typing import Any

import msgspec
import pytest

from ropeway.compiler.errors import RequestError
from ropeway.serving.openai.messages import ChatRequest
from ropeway.serving.parsing.tools import NO_TOOLS, ToolUse, tool_use


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def use_of(**fields: Any) -> ToolUse:
    return tool_use(msgspec.convert({"messages": [], **fields}, ChatRequest))


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TWO = [tool("f"), tool("g", parameters={"type": "object", "properties": {"a": {}}})]


@pytest.mark.parametrize(
    ("fields", "names", "mode", "name", "single"),
    [
        ({}, [], "none", None, False),
        ({"tools": []}, [], "none", None, False),
        ({"tools": [], "tool_choice": "auto"}, [], "none", None, False),
        ({"tool_choice": "none"}, [], "none", None, False),
        ({"tools": TWO}, ["f", "g"], "auto", None, False),
        ({"tools": TWO, "tool_choice": "auto"}, ["f", "g"], "auto", None, False),
        ({"tools": TWO, "tool_choice": "none"}, [], "none", None, False),
        ({"tools": TWO, "tool_choice": "required"}, ["f", "g"], "required", None, False),
        ({"tools": TWO, "parallel_tool_calls": False}, ["f", "g"], "auto", None, True),
        ({"tools": TWO, "parallel_tool_calls": True}, ["f", "g"], "auto", None, False),
        ({"tools": TWO, "tool_choice": named("g")}, ["f", "g"], "required", "g", True),
        ({"tools": TWO, "tool_choice": allowed("auto", "g")}, ["g"], "auto", None, False),
        ({"tools": TWO, "tool_choice": allowed("required", "f")}, ["f"], "required", None, False),
        ({"functions": [{"name": "f"}]}, ["f"], "auto", None, True),
        ({"functions": [{"name": "f"}], "function_call": "none"}, [], "none", None, True),
        ({"functions": [{"name": "f"}], "function_call": "auto"}, ["f"], "auto", None, True),
        (
            {"functions": [{"name": "f"}], "function_call": {"name": "f"}},
            ["f"],
            "required",
            "f",
            True,
        ),
        ({"function_call": "none"}, [], "none", None, True),
    ],
)
def test_what_may_be_called(
    fields: dict[str, Any], names: list[str], mode: str, name: str | None, single: bool
) -> None:
    use = use_of(**fields)
    assert [one.function.name for one in use.tools] == names
    assert (use.mode, use.name, use.single) == (mode, name, single)
    assert use.legacy == ("functions" in fields or "function_call" in fields)
    callable_names = [one.function.name for one in use.callable_tools]
    assert callable_names == ([name] if name else names)


def test_no_tools() -> None:
    assert use_of() == NO_TOOLS


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("x" * 65)]}, "tools[1].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
        ({"tools": [tool("é")]}, "tools[0].function.name"),
        (
            {"tools": [tool("f", parameters={"type": "string"})]},
            "tools[0].function.parameters.type",
        ),
        (
            {"tools": [tool("f", parameters={"properties": []})]},
            "tools[0].function.parameters.properties",
        ),
        (
            {"tools": [tool("f", parameters={"properties": {"a": 1}})]},
            "tools[0].function.parameters.properties.a",
        ),
        (
            {"tools": [tool("f", parameters={"required": "a"})]},
            "tools[0].function.parameters.required",
        ),
        ({"tools": [tool(f"f{k}") for k in range(1025)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": named("f")}, "tool_choice"),
        ({"tools": TWO, "tool_choice": named("h")}, "tool_choice.function.name"),
        (
            {"tools": TWO, "tool_choice": allowed("auto", "f", "h")},
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        ({"tools": TWO, "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [{"nam": "f"}]}, "functions"),
        ({"functions": [{"name": "f"}], "tools": TWO}, "tools"),
        ({"functions": [{"name": "f"}], "tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
        ({"functions": [{"name": "f"}], "function_call": "f"}, "function_call"),
        ({"functions": [{"name": "f"}], "function_call": {}}, "function_call"),
        ({"function_call": "auto"}, None),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], field: str | None) -> None:
    if field is None:
        use_of(**fields)
        return
    with pytest.raises(RequestError) as caught:
        use_of(**fields)
    assert caught.value.field == field

"""Which tools a request brings, and whether they may or must be called."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ropeway.serving.openai.messages import ChatRequest, Tool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the model is told of, and what may become of them.

    `mode` "none": no call is looked for; "auto": the model decides; "required": it must call one of
    them, or the one called `name`. `parallel` False: one call at most. `legacy`: the request used
    `functions`, so that its answer has `function_call`.
    """

    tools: "Sequence[Tool]" = ()
    mode: Literal["none", "auto", "required"] = "none"
    name: str | None = None
    parallel: bool = True
    legacy: bool = False


NO_TOOLS = ToolUse()


def tool_use(request: "ChatRequest") -> ToolUse:
    """The tools of a chat request. Raises RequestError that names the field."""
    if not request.tools or request.tool_choice == "none":
        return NO_TOOLS
    return ToolUse(tuple(request.tools), "auto")

"""OpenAI's chat messages and tools, as chat templates take them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ropeway.serving.parsing.choose import ChatFormat
from ropeway.serving.parsing.tools import ToolUse

if TYPE_CHECKING:
    from ropeway.serving.openai.messages import Message


def template_messages(
    messages: "Sequence[Message]", form: ChatFormat, use: ToolUse
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages and the tools to render. Raises RequestError that names the path."""
    return [msgspec.to_builtins(message) for message in messages], None

"""Which format a model writes reasoning and tool calls in, and the parser for it."""

from dataclasses import dataclass
from typing import Literal

from ropeway.serving.parsing.pieces import OutputParser, PlainText
from ropeway.serving.parsing.tools import ToolUse
from ropeway.serving.settings import ServerSettings

ToolFormat = Literal["none", "hermes", "llama3_json", "mistral"]
ReasoningFormat = Literal["none", "think"]


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model's chats are written; made once for a server."""

    tools: ToolFormat = "none"
    reasoning: ReasoningFormat = "none"
    reads_tools: bool = False  # the template has a place for the tools
    reads_calls: bool = False  # ... for the calls of an assistant's message
    reads_developer: bool = False  # ... for the role "developer"

    def needs_special_tokens(self, use: ToolUse) -> bool:
        """Whether markers are special tokens: skip_special_tokens must then be False."""
        return use.mode != "none" and self.tools in ("llama3_json", "mistral")


def chat_format(settings: ServerSettings, template: str | None) -> ChatFormat:
    """What `settings` say; "auto" looks at the chat template's text. Raises ConfigError for the
    name of a parser that doesn't exist."""
    return ChatFormat()


def make_parser(form: ChatFormat, use: ToolUse, prompt_end: str) -> OutputParser:
    """A new parser for one choice. `prompt_end` is the text, special tokens shown, of the prompt's
    last tokens (16 will do): a template may have begun the reasoning there."""
    return PlainText()

"""Which format a model writes reasoning and tool calls in, and the parser for it."""

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from ropeway.compiler.errors import InputError
from ropeway.serving.parsing import hermes, llama3_json, mistral, reasoning
from ropeway.serving.parsing.call_shape import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_NAMED,
    CallShape,
)
from ropeway.serving.parsing.markers import special_id
from ropeway.serving.parsing.pieces import OutputParser, PlainText
from ropeway.serving.parsing.tools import ToolUse
from ropeway.serving.settings import ServerSettings

if TYPE_CHECKING:
    from ropeway.runtime.text.tokenizer import Tokenizer

ToolFormat = Literal["none", "hermes", "llama3_json", "mistral"]
ReasoningFormat = Literal["none", "think"]
Format = TypeVar("Format")

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "none": "none",
    "hermes": "hermes",
    "llama3_json": "llama3_json",
    "mistral": "mistral",
}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {"none": "none", "think": "think"}

# Other formats share the marker of Hermes: a call's arguments as tags.
_OTHERS = ("<function=", "<arg_key>")
_MARKERS: Mapping[ToolFormat, Sequence[str]] = {
    "none": (),
    "hermes": (hermes.OPEN.text, hermes.CLOSE.text),
    "llama3_json": (llama3_json.TAG.text,),
    "mistral": (mistral.CALLS.text, mistral.CALL_ID, mistral.ARGUMENTS),
}
_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model's chats are written; made once for a server."""

    tools: ToolFormat = "none"
    reasoning: ReasoningFormat = "none"
    shape: CallShape = HERMES  # how calls are written, where that isn't the model's own choice
    reads_tools: bool = False  # the template has a place for the tools
    reads_calls: bool = False  # ... for the calls of an assistant's message
    reads_developer: bool = False  # ... for the role "developer"

    def needs_special_tokens(self, use: ToolUse, tokenizer: "Tokenizer") -> bool:
        """Whether a marker is a special token: skip_special_tokens must then be False."""
        markers: list[str] = []
        if use.mode != "none":
            markers += _MARKERS[self.tools]
        if self.reasoning == "think":
            markers += (reasoning.OPEN.text, reasoning.CLOSE.text)
        return any(special_id(tokenizer, marker) is not None for marker in markers)


def chat_format(settings: ServerSettings, template: str | None) -> ChatFormat:
    """What `settings` say; "auto" looks at the text of the chat template, None for none.

    Raises InputError for the name of a parser that doesn't exist.
    """
    text = template or ""
    reads_tools = _mentions(text, "tools")
    tools = _known("--tool-call-parser", settings.tool_call_parser, TOOL_FORMATS)
    thinking = _known("--reasoning-parser", settings.reasoning_parser, REASONING_FORMATS)
    thinks = reasoning.OPEN.text in text or reasoning.CLOSE.text in text
    chosen = tools or _guess(text, reads_tools)
    return ChatFormat(
        tools=chosen,
        reasoning=thinking or ("think" if thinks else "none"),
        shape=_shape(chosen, text),
        reads_tools=reads_tools,
        reads_calls=_mentions(text, "tool_calls"),
        reads_developer=_mentions(text, "developer"),
    )


def make_parser(form: ChatFormat, use: ToolUse, prompt_end: str) -> OutputParser:
    """A new parser for one choice. `prompt_end` is the text, special tokens shown, of the prompt's
    last tokens (16 will do), or of a message that is continued: reasoning may have begun there."""
    parser = _tool_parser(form, use)
    if form.reasoning == "none":
        return parser
    return reasoning.ThinkParser(parser, opened=reasoning.is_open(prompt_end))


def _tool_parser(form: ChatFormat, use: ToolUse) -> OutputParser:
    single = use.single
    if use.mode == "none" or form.tools == "none":
        return PlainText()
    if form.tools == "hermes":
        return hermes.HermesParser(_new_id, single=single)
    if form.tools == "mistral":
        return mistral.MistralParser(_new_short_id, single=single)
    names = {tool.function.name for tool in use.tools}
    return llama3_json.Llama3JsonParser(_new_id, names, single=single)


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _new_short_id() -> str:
    """Mistral's templates take no others when the call comes back in a message."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


def _guess(template: str, reads_tools: bool) -> ToolFormat:
    """The format that a template speaks of. One without tools is told of them in Hermes' way."""
    if mistral.CALLS.text in template:
        return "mistral"
    if hermes.OPEN.text in template:
        return "none" if any(other in template for other in _OTHERS) else "hermes"
    if llama3_json.TAG.text in template or (reads_tools and '"parameters"' in template):
        return "llama3_json"
    return "none" if reads_tools else "hermes"


def _shape(tools: ToolFormat, template: str) -> CallShape:
    if tools == "mistral":
        return MISTRAL_NAMED if mistral.ARGUMENTS in template else MISTRAL
    return LLAMA3_JSON if tools == "llama3_json" else HERMES


def _mentions(template: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", template) is not None


def _known(option: str, name: str, formats: Mapping[str, Format]) -> Format | None:
    """The format called `name`; None for "auto"."""
    if name != "auto" and name not in formats:
        raise InputError(f"{option}: there is no parser {name!r}: auto, {', '.join(formats)}")
    return formats.get(name)

"""A chat's prompt: the messages through the model's template, as token ids.

Contract: everything here is slow (it renders and tokenizes) and belongs in a thread.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropeway.compiler.errors import RequestError
from ropeway.runtime.text.tokenizer import Tokenizer
from ropeway.serving.openai.messages import (
    AudioPart,
    ChatRequest,
    FilePart,
    ImagePart,
    Message,
    RefusalPart,
    TextPart,
)
from ropeway.serving.parsing.choose import ChatFormat
from ropeway.serving.parsing.messages import template_messages
from ropeway.serving.parsing.tools import ToolUse

if TYPE_CHECKING:
    from ropeway.runtime.text.chat_template import RenderedChat

_END_TOKENS = 16  # what a parser is told of the prompt's end
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "self"})
_MEDIA: dict[type, str] = {ImagePart: "image_url", AudioPart: "input_audio", FilePart: "file"}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """`end` is the text of the last tokens, or of the message that is continued; `echo` that
    message's text, "" where none is."""

    ids: tuple[int, ...]
    end: str
    echo: str = ""


def check_messages(messages: Sequence[Message]) -> None:
    """Raises RequestError for content that isn't text."""
    if not messages:
        raise RequestError("messages", "the list is empty: give at least one message")
    for index, message in enumerate(messages):
        if message.audio is not None:
            raise RequestError(f"messages[{index}].audio", "this model reads text only")
        if not isinstance(message.content, list):
            continue
        for k, part in enumerate(message.content):
            kind = _MEDIA.get(type(part))
            if kind is not None:
                raise RequestError(
                    f"messages[{index}].content[{k}].type",
                    f"{kind!r}: this model reads text only, parts of type 'text'",
                )


def encode_chat(
    request: ChatRequest,
    form: ChatFormat,
    use: ToolUse,
    tokenizer: Tokenizer,
    *,
    allow_special_tokens: bool,
) -> ChatPrompt:
    """Renders and encodes the messages. Raises RequestError for what the template refuses.

    With `allow_special_tokens` the text of a special token in a message becomes that token.
    """
    messages, tools = template_messages(request.messages, form, use)
    options = _template_options(request)
    rendered, continued = _render(request, messages, tools, options, tokenizer)
    if allow_special_tokens:
        ids = tokenizer.encode(rendered.text, add_special_tokens=False)
    else:
        ids = tokenizer.encode_rendered(rendered)
    end = continued or tokenizer.decode(ids[-_END_TOKENS:], skip_special_tokens=False)
    return ChatPrompt(tuple(ids), end, continued)


def _template_options(request: ChatRequest) -> dict[str, Any]:
    """The template's own variables."""
    given = dict(request.chat_template_kwargs or {})
    for name in _RESERVED & given.keys():
        raise RequestError(f"chat_template_kwargs.{name}", "is a field of the request itself")
    if request.reasoning_effort is not None:
        given.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            given.setdefault("enable_thinking", False)
    return given


def _render(
    request: ChatRequest,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    options: Mapping[str, Any],
    tokenizer: Tokenizer,
) -> tuple["RenderedChat", str]:
    """The rendered chat, and the text of the message that is continued."""
    if not request.continue_final_message:
        prompt = request.add_generation_prompt is not False
        return tokenizer.render_chat(
            messages, tools=tools, add_generation_prompt=prompt, **options
        ), ""
    if request.add_generation_prompt:
        raise RequestError("continue_final_message", "contradicts add_generation_prompt: keep one")
    text = _text_of(request.messages[-1])
    # The template writes something after every message. It ends at a mark that nobody can guess.
    mark = "".join(chr(0x100000 + secrets.randbelow(0xFFFE)) for _ in range(8))
    written = messages[-1].get("content")
    open_message = {"content": f"{written if isinstance(written, str) else text}{mark}"}
    messages = [*messages[:-1], messages[-1] | open_message]
    rendered = tokenizer.render_chat(messages, tools=tools, add_generation_prompt=False, **options)
    return _cut(rendered, mark), text


def _cut(rendered: "RenderedChat", mark: str) -> "RenderedChat":
    end = rendered.text.find(mark)
    if end < 0 or rendered.text.count(mark) > 1:
        raise RequestError(
            "continue_final_message", "this chat template doesn't write the last message as it is"
        )
    spans = rendered.spans
    kept = None if spans is None else tuple(span for span in spans if span[1] <= end)
    return type(rendered)(rendered.text[:end], kept)


def _text_of(message: Message) -> str:
    """A message's content as one text."""
    if isinstance(message.content, str):
        return message.content
    return "".join(
        part.text if isinstance(part, TextPart) else part.refusal
        for part in message.content or []
        if isinstance(part, TextPart | RefusalPart)
    )

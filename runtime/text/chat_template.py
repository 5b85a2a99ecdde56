"""Chat templates: messages to the text of a prompt, as transformers renders them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes

from ropeway.compiler.errors import RequestError
from ropeway.runtime.text.literal import Span, SpecialTexts, template_spans
from ropeway.runtime.text.template_sandbox import (
    MAX_SOURCE,
    TemplateEnvironment,
    TemplateLimitError,
    TemplateRefusalError,
)

_ROLES = ("system", "user", "assistant", "tool", "developer")

# What a template can raise besides jinja2's own errors when it meets values it wasn't made for.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The text of a chat; `spans` are the template's special tokens in it where a user's text
    holds others, None where plain encoding is right."""

    text: str
    spans: tuple[Span, ...] | None = None


class ChatTemplate:
    """A compiled template. `names` are its constants (bos_token, eos_token...), `specials` the
    texts of the tokenizer's special tokens.

    Raises RequestError (field "messages") for a template that doesn't compile.
    """

    def __init__(self, source: str, names: Mapping[str, str], specials: SpecialTexts) -> None:
        if len(source) > MAX_SOURCE:
            raise RequestError("messages", f"the chat template is over {MAX_SOURCE} characters")
        self._environment = TemplateEnvironment()
        self._names = dict(names)
        self._specials = specials
        try:
            self._template = self._environment.from_string(source)
            tree = self._environment.parse(source)
            self._reads_parts = _loops_over_content(tree)
            self._texts = {c.value for c in tree.find_all(nodes.Const) if isinstance(c.value, str)}
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                "messages", f"the chat template is broken at line {error.lineno}: {error.message}"
            ) from error
        except _TEMPLATE_FAULTS as error:
            raise RequestError("messages", f"the chat template is broken: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> RenderedChat:
        """Renders `messages` (role and content each); `options` are the template's own variables.

        A content given as parts of text is joined for a template that doesn't read parts. Raises
        RequestError for messages of a wrong shape and for whatever the template refuses.
        """
        checked = [self._message(i, m) for i, m in enumerate(_sequence(messages))]
        if not checked:
            raise RequestError("messages", "the list is empty: give at least one message")
        variables = {"messages": checked, "tools": tools, **options}
        constants = {"add_generation_prompt": add_generation_prompt, **self._names}

        def render(inputs: Mapping[str, Any]) -> str:
            return self._render({**constants, **inputs})

        text, spans = template_spans(render, variables, self._specials)
        return RenderedChat(text, None if spans is None else tuple(spans))

    def _render(self, variables: dict[str, Any]) -> str:
        try:
            return self._environment.render_bounded(self._template, variables)
        except TemplateRefusalError as error:
            raise RequestError("messages", f"the chat template refuses: {error}") from error
        except TemplateLimitError as error:
            raise RequestError("messages", f"the chat template was stopped: {error}") from error
        except _TEMPLATE_FAULTS as error:
            kind = type(error).__name__
            raise RequestError("messages", f"the chat template failed: {kind}: {error}") from error

    def _message(self, index: int, message: Any) -> dict[str, Any]:
        field = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(field, "must be an object with role and content")
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{field}.role", "must be a string, such as 'user'")
        role = message["role"]
        if role not in _ROLES and role not in self._texts:  # a template may have its own
            raise RequestError(f"{field}.role", f"{role!r} is unknown: {', '.join(_ROLES)}")
        checked = dict(message)
        content = checked.get("content")
        if isinstance(content, list | tuple):
            checked["content"] = self._parts(f"{field}.content", content)
        elif content is not None and not isinstance(content, str):
            raise RequestError(f"{field}.content", "must be a string or a list of text parts")
        return checked

    def _parts(self, field: str, parts: Sequence[Any]) -> str | list[Any]:
        texts = []
        for k, part in enumerate(parts):
            text = part if isinstance(part, str) else None
            if isinstance(part, Mapping) and part.get("type") == "text":
                text = part.get("text")
            if not isinstance(text, str):
                raise RequestError(f"{field}[{k}]", "must be a part of type 'text'")
            texts.append(text)
        if self._reads_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "".join(texts)


def _sequence(messages: Any) -> Sequence[Any]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages", "must be a list of messages, each with role and content")
    return messages


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether a `for` of the template runs over a message's content."""

    def names_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.name == "content"
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        return (
            isinstance(node, nodes.Getitem)
            and isinstance(node.arg, nodes.Const)
            and node.arg.value == "content"
        )

    return any(names_content(loop.iter) for loop in tree.find_all(nodes.For))

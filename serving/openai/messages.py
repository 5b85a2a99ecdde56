"""A chat request's body: messages, tools and the fields that only chats have."""

from typing import Annotated, Any, Literal

import msgspec

from ropeway.serving.openai.fields import GenerationFields, Logprobs


class _Part(msgspec.Struct, tag_field="type", kw_only=True, forbid_unknown_fields=True):
    prompt_cache_breakpoint: dict[str, Any] | None = None


class TextPart(_Part, tag="text", kw_only=True, forbid_unknown_fields=True):
    """Text."""

    text: str


class RefusalPart(_Part, tag="refusal", kw_only=True, forbid_unknown_fields=True):
    """What an assistant said instead of answering."""

    refusal: str


class ImagePart(_Part, tag="image_url", kw_only=True, forbid_unknown_fields=True):
    """An image; refused."""

    image_url: dict[str, Any]


class AudioPart(_Part, tag="input_audio", kw_only=True, forbid_unknown_fields=True):
    """Sound; refused."""

    input_audio: dict[str, Any]


class FilePart(_Part, tag="file", kw_only=True, forbid_unknown_fields=True):
    """A file; refused."""

    file: dict[str, Any]


Part = TextPart | RefusalPart | ImagePart | AudioPart | FilePart


class CalledFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A call that the assistant made before. `index` comes along where a client sends back what
    was streamed."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a chat; which roles there are is the template's affair."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None
    annotations: list[Any] | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that may be called; `parameters` is a JSON schema."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool; only functions can be served."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The function that must be called."""

    name: str


class AllowedTools(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class NamedChoice(
    msgspec.Struct, tag="function", tag_field="type", kw_only=True, forbid_unknown_fields=True
):
    """This function must be called."""

    function: FunctionName


class AllowedChoice(
    msgspec.Struct, tag="allowed_tools", tag_field="type", kw_only=True, forbid_unknown_fields=True
):
    """Only these may be called."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    # Extensions.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    # Accepted or refused as `meaning.py` says.
    audio: dict[str, Any] | None = None
    function_call: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] | None = None
    modalities: list[str] | None = None
    moderation: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None

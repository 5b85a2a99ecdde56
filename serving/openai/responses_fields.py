"""The body of /v1/responses: every field of OpenAI's published schema, and the usual extensions.

Contract: fields in NO_MEANING are taken and change nothing, what REFUSED and OTHER_* list is a 400
that says so, the rest is served. No state is kept, so `store` is taken but nothing is stored.
"""

from typing import Annotated, Any, Literal

import msgspec

from ropeway.runtime.sampling.structured import StructuredOutputs
from ropeway.serving.openai.fields import Count, Penalty, Share

Positive = Annotated[int, msgspec.Meta(ge=1)]
Status = Literal["in_progress", "completed", "incomplete"]

NO_MEANING = {
    "context_management": "nothing is compacted: an input that doesn't fit is a 400",
    "include": "all but message.output_text.logprobs name results of tools that aren't served",
    "max_tool_calls": "counts calls of OpenAI's own tools",
    "metadata": "comes back in the answer",
    "prompt_cache_key": "prefixes are cached by their content; cache_salt keeps users apart",
    "prompt_cache_options": "prefixes are cached by their content",
    "prompt_cache_retention": "prefixes stay cached until their blocks are needed",
    "reasoning.context": "the input says which reasoning is shown to the model",
    "reasoning.generate_summary": "the thinking itself is answered",
    "reasoning.mode": "there is one mode",
    "reasoning.summary": "the thinking itself is answered",
    "safety_identifier": "no user is tracked",
    "service_tier": "there is one tier; priority orders requests",
    "store": "nothing is stored",
    "stream_options": "events aren't padded",
    "text.verbosity": "a wish to one provider's models",
    "truncation": "an input that doesn't fit is a 400, with 'auto' too",
    "user": "no user is tracked",
}
REFUSED = {
    "background": "nothing runs in the background here: leave it out and stream",
    "conversation": "no conversation is kept here: give its items as input",
    "moderation": "nothing is moderated here: leave it out",
    "previous_response_id": "no answer is kept here: give its items as input, before the new ones",
    "prompt": "no prompts are kept here: give instructions and input",
}
# Kinds that belong to OpenAI's own tools or to what it stores; a request that has one is told so.
OTHER_ITEMS = frozenset(
    (
        "additional_tools",
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "compaction",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "file_search_call",
        "image_generation_call",
        "item_reference",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    )
)
OTHER_TOOLS = frozenset(
    (
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "namespace",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    )
)
OTHER_PARTS = frozenset(("input_audio", "input_file", "input_image"))


class _Tagged(msgspec.Struct, tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """A part, an item or a choice of tools: `type` says which."""


class InputText(_Tagged, tag="input_text"):
    """Text that the model is given."""

    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class OutputText(_Tagged, tag="output_text"):
    """Text that a model has written."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(_Tagged, tag="refusal"):
    """What a model said instead of answering."""

    refusal: str


class ReasoningText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A model's thinking."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A summary of it."""

    type: Literal["summary_text"]
    text: str


Part = InputText | OutputText | Refusal


class MessageItem(_Tagged, tag="message"):
    """A message; `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(_Tagged, tag="function_call"):
    """A call that a model made."""

    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: dict[str, Any] | None = None
    namespace: str | None = None


class FunctionCallOutputItem(_Tagged, tag="function_call_output"):
    """What came of a call."""

    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: Status | None = None
    caller: dict[str, Any] | None = None
    name: str | None = None
    namespace: str | None = None


class ReasoningItem(_Tagged, tag="reasoning"):
    """What a model thought before. `encrypted_content` can't be read here."""

    summary: list[SummaryText]
    id: str | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that may be called; `parameters` is a JSON schema."""

    type: Literal["function"]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None
    allowed_callers: list[Literal["direct", "programmatic"]] | None = None
    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None


class FunctionChoice(_Tagged, tag="function"):
    """This function must be called."""

    name: str


class AllowedToolsChoice(_Tagged, tag="allowed_tools"):
    """Only these may be called, or one of them must."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class TextFormat(_Tagged, tag="text"):
    """Any text."""


class JsonObjectFormat(_Tagged, tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(_Tagged, tag="json_schema"):
    """JSON of one schema."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text must look like."""

    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a model that thinks does so: `effort` is handed to its chat template."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_obfuscation: bool | None = None


Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/responses. `input`: a text, or the items of a conversation."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0)] | None = None
    top_p: Share | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    include: list[Includable] | None = None
    text: TextConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | FunctionChoice | AllowedToolsChoice | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    metadata: dict[str, str] | None = None
    # Extensions, named as vLLM users know them.
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Share | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    logit_bias: dict[int, float] | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: str | None = None
    # Taken or refused, as the tables above say.
    background: bool | None = None
    context_management: list[dict[str, Any]] | None = None
    conversation: str | dict[str, Any] | None = None
    max_tool_calls: Count | None = None
    moderation: dict[str, Any] | None = None
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None

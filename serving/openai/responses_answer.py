"""What /v1/responses answers: the response object and its items."""

from typing import Any, Literal

import msgspec

from ropeway.serving.openai.logprobs import TokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class _Tagged(msgspec.Struct, tag_field="type", kw_only=True):
    """`type` says what it is."""


class OutputText(_Tagged, tag="output_text"):
    """Text for the reader."""

    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)


class ReasoningText(_Tagged, tag="reasoning_text"):
    """Text of the model's thinking."""

    text: str


class MessageOutput(_Tagged, tag="message"):
    """What the model says."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = msgspec.field(default_factory=list)


class ReasoningOutput(_Tagged, tag="reasoning"):
    """What the model thinks; nothing of it is summed up or encrypted."""

    id: str
    status: Status
    summary: list[Any] = msgspec.field(default_factory=list)
    content: list[ReasoningText] = msgspec.field(default_factory=list)
    encrypted_content: None = None


class FunctionCallOutput(_Tagged, tag="function_call"):
    """A call that the model wants made."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str = ""


OutputItem = MessageOutput | ReasoningOutput | FunctionCallOutput


class InputTokensDetails(msgspec.Struct):
    """`cached_tokens` were found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """`reasoning_tokens`: tokens that the text of the model's thinking makes."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Why an answer isn't whole."""

    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct):
    """Why there is no answer."""

    code: str
    message: str


class Response(msgspec.Struct, kw_only=True):
    """The response object. What the request said of no effect comes back as it was given."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputItem] = msgspec.field(default_factory=list)
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: dict[str, Any] = msgspec.field(default_factory=dict)
    background: Literal[False] = False
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float = 1.0
    text: dict[str, Any] = msgspec.field(default_factory=dict)
    tool_choice: Any = "auto"
    tools: list[Any] = msgspec.field(default_factory=list)
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: Literal["disabled"] = "disabled"
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

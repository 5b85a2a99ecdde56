"""What requests of both generation endpoints share: OpenAI's fields and the usual extensions.

Contract: every field of OpenAI's published schema stands in a struct, whether or not it can be
served; `meaning.py` says what becomes of those that can't. None is the default that OpenAI gives.
"""

from typing import Annotated, Any

import msgspec

from ropeway.runtime.sampling.structured import StructuredOutputs

MAX_LOGPROBS = 20  # alternatives of a token, as OpenAI's top_logprobs

Count = Annotated[int, msgspec.Meta(ge=0)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Logprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`continuous_usage_stats`: every chunk says how many tokens there were up to it."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The schema of a response_format."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(
    msgspec.Struct, tag="text", tag_field="type", kw_only=True, forbid_unknown_fields=True
):
    """Any text."""


class JsonObjectFormat(
    msgspec.Struct, tag="json_object", tag_field="type", kw_only=True, forbid_unknown_fields=True
):
    """Any JSON object."""


class JsonSchemaFormat(
    msgspec.Struct, tag="json_schema", tag_field="type", kw_only=True, forbid_unknown_fields=True
):
    """JSON of one schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class GenerationFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that both endpoints take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0)] | None = None
    top_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    # Extensions, named as vLLM users know them.
    best_of: Choices | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, msgspec.Meta(ge=-10.0, le=10.0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    stop_token_ids: list[Count] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    prompt_logprobs: Logprobs | None = None
    allowed_token_ids: list[Count] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: str | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = None


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/completions. `prompt`: a text, texts, token ids or lists of token ids."""

    prompt: str | list[str | Count | list[Count]]
    logprobs: Logprobs | None = None
    suffix: str | None = None

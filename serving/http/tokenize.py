"""Text to token ids and back, as the model would see it; fields as vLLM users know them."""

from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ropeway.compiler.errors import RequestError
from ropeway.runtime.text.tokenizer import Tokenizer
from ropeway.serving.errors import ApiError
from ropeway.serving.http.body import json_answer, read_body
from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.endpoint import Endpoint
from ropeway.serving.openai.decoding import decode_request

TokenId = Annotated[int, msgspec.Meta(ge=0)]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `prompt`, or `messages` that go through the chat template. `add_special_tokens` concerns
    prompts, the rest chats. `return_token_strs`: also each token's text."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`count` tokens; a sequence of this model can have `max_model_len`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId]


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Their text, special tokens included."""

    prompt: str


async def tokenize(request: Request, context: ServerContext) -> Response:
    """The token ids of a prompt or a chat."""
    asked = decode_request(await read_body(request, context), TokenizeRequest, context)
    context.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("prompt", "give either prompt or messages")
    tokenizer = _tokenizer(context)
    ids, texts = await context.client.in_thread(_tokens, tokenizer, asked)
    info = context.client.info
    return json_answer(
        TokenizeAnswer(
            count=len(ids), max_model_len=info.max_model_len, tokens=ids, token_strs=texts
        )
    )


def _tokens(tokenizer: Tokenizer, asked: TokenizeRequest) -> tuple[list[int], list[str] | None]:
    if asked.prompt is not None:
        ids = tokenizer.encode(asked.prompt)
    else:
        ids = tokenizer.encode_chat(
            asked.messages or [],
            tools=asked.tools,
            add_generation_prompt=asked.add_generation_prompt,
            **(asked.chat_template_kwargs or {}),
        )
    texts = [tokenizer.token_text(token) for token in ids] if asked.return_token_strs else None
    return ids, texts


async def detokenize(request: Request, context: ServerContext) -> Response:
    """The text of token ids."""
    asked = decode_request(await read_body(request, context), DetokenizeRequest, context)
    context.check_model(asked.model)
    tokenizer = _tokenizer(context)
    size = context.client.info.vocab_size
    wrong = next((i for i, token in enumerate(asked.tokens) if token >= size), None)
    if wrong is not None:
        raise RequestError(
            f"tokens[{wrong}]",
            f"{asked.tokens[wrong]} isn't a token id: the model has 0 to {size - 1}",
        )
    text = await context.client.in_thread(tokenizer.decode, asked.tokens, False)
    return json_answer(DetokenizeAnswer(prompt=text))


def _tokenizer(context: ServerContext) -> Tokenizer:
    tokenizer = context.client.tokenizer
    if tokenizer is None:
        raise ApiError(400, "this model came without a tokenizer: it takes and gives token ids")
    return tokenizer


ENDPOINTS = [
    Endpoint(
        "/tokenize",
        "POST",
        tokenize,
        "Token ids of a prompt or a chat.",
        request_type=TokenizeRequest,
        response_type=TokenizeAnswer,
    ),
    Endpoint(
        "/detokenize",
        "POST",
        detokenize,
        "Text of token ids.",
        request_type=DetokenizeRequest,
        response_type=DetokenizeAnswer,
    ),
]

"""Every field of OpenAI's published schema is taken, and what becomes of each is said."""

import re
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import (
    chat_completion_assistant_message_param,
    chat_completion_content_part_param,
    chat_completion_developer_message_param,
    chat_completion_function_message_param,
    chat_completion_system_message_param,
    chat_completion_tool_message_param,
    chat_completion_user_message_param,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.chat.chat_completion_stream_options_param import (
    ChatCompletionStreamOptionsParam,
)
from support.toy_server import MODEL, ToyServer

from ropeway.serving.openai import meaning
from ropeway.serving.openai.fields import CompletionRequest, StreamOptions
from ropeway.serving.openai.meaning import NO_MEANING, REFUSED
from ropeway.serving.openai.messages import ChatRequest, Message

MESSAGES = [{"role": "user", "content": "hi"}]
# A value of each field without meaning that clients really send.
VALUES: dict[str, Any] = {
    "metadata": {"team": "a"},
    "prediction": {"type": "content", "content": "hi"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "service_tier": "auto",
    "spaces_between_special_tokens": True,
    "store": True,
    "user": "u",
    "verbosity": "low",
}
REFUSED_VALUES: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "suffix": "and then",
    "web_search_options": {},
}


def test_the_documents_tables_are_the_codes() -> None:
    text = Path(meaning.__file__).with_name("FIELDS.md").read_text()
    accepted, refused = text.split("## Refused with 400")
    rows = [
        dict(re.findall(r"^\| `(.*?)` \| (.*) \|$", part, re.M)) for part in (accepted, refused)
    ]
    assert rows[0] == NO_MEANING
    assert rows[1] == {name: refusal.why for name, refusal in REFUSED.items()}


def _published(*kinds: Any) -> set[str]:
    return {name for kind in kinds for name in typing.get_type_hints(kind)}


def _known(kind: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)}


def test_completions_know_every_published_field() -> None:
    params = completion_create_params
    published = _published(
        params.CompletionCreateParamsNonStreaming, params.CompletionCreateParamsStreaming
    )
    assert len(published) > 15
    assert published <= _known(CompletionRequest)


def test_chats_know_every_published_field() -> None:
    params = chat_create_params
    published = _published(
        params.CompletionCreateParamsNonStreaming, params.CompletionCreateParamsStreaming
    )
    assert len(published) > 30
    assert published <= _known(ChatRequest)


def test_messages_know_every_published_field() -> None:
    kinds = [
        chat_completion_assistant_message_param.ChatCompletionAssistantMessageParam,
        chat_completion_developer_message_param.ChatCompletionDeveloperMessageParam,
        chat_completion_function_message_param.ChatCompletionFunctionMessageParam,
        chat_completion_system_message_param.ChatCompletionSystemMessageParam,
        chat_completion_tool_message_param.ChatCompletionToolMessageParam,
        chat_completion_user_message_param.ChatCompletionUserMessageParam,
    ]
    assert _published(*kinds) <= _known(Message)
    assert _published(ChatCompletionStreamOptionsParam) <= _known(StreamOptions)


def test_parts_know_every_published_kind_and_field() -> None:
    published = typing.get_args(chat_completion_content_part_param.ChatCompletionContentPartParam)
    [content] = [f for f in msgspec.structs.fields(Message) if f.name == "content"]
    known = {}
    for kind in typing.get_args(content.type):
        for part in typing.get_args(kind):
            parts = typing.get_args(part) if isinstance(part, types.UnionType) else (part,)
            known |= {one.__struct_config__.tag: _known(one) | {"type"} for one in parts}
    assert len(published) == 4
    for part in published:
        [tag] = typing.get_args(typing.get_args(typing.get_type_hints(part)["type"])[0] or ()) or (
            typing.get_args(typing.get_type_hints(part)["type"])
        )
        assert _published(part) <= known[tag]


def test_tables_name_fields_that_exist() -> None:
    known = _known(ChatRequest) | _known(CompletionRequest)
    nested = {"stream_options.include_obfuscation", "prompt_cache_breakpoint"}
    assert set(NO_MEANING) - nested <= known
    assert set(REFUSED) <= known
    assert not set(NO_MEANING) & set(REFUSED)
    assert set(VALUES) == set(NO_MEANING) - nested
    assert set(REFUSED_VALUES) == set(REFUSED)


@pytest.mark.parametrize("name", sorted(VALUES))
def test_fields_without_meaning_change_nothing(name: str, toy: Any) -> None:
    server: ToyServer = toy()
    plain = server.whole("/chat/completions", messages=MESSAGES, temperature=0, max_tokens=4)
    given = server.whole(
        "/chat/completions", messages=MESSAGES, temperature=0, max_tokens=4, **{name: VALUES[name]}
    )
    assert given["choices"] == plain["choices"]


@pytest.mark.parametrize("name", sorted(REFUSED_VALUES))
def test_fields_that_cant_be_served_are_refused(name: str, toy: Any) -> None:
    chat = name in _known(ChatRequest)
    body = {"messages": MESSAGES} if chat else {"prompt": "hi"}
    path = "/chat/completions" if chat else "/completions"
    error = toy().refused(path, **body, **{name: REFUSED_VALUES[name]})
    assert error["param"] == name
    assert error["message"].startswith(f"{name}: ")


def test_null_is_the_default_everywhere(toy: Any) -> None:
    server: ToyServer = toy()
    for path, kind, own in (
        ("/completions", CompletionRequest, {"prompt": "hi"}),
        ("/chat/completions", ChatRequest, {"messages": MESSAGES, "max_tokens": 16}),
    ):
        nulls = dict.fromkeys(_known(kind) - set(own), None)
        plain = server.whole(path, **own, model=MODEL, seed=1)
        given = server.whole(path, **{**nulls, **own, "model": MODEL, "seed": 1})
        assert given["choices"] == plain["choices"]


def test_text_alone_is_a_modality_that_is_served(toy: Any) -> None:
    toy().whole("/chat/completions", messages=MESSAGES, max_tokens=1, modalities=["text"])
    toy().whole("/completions", prompt="hi", suffix="")

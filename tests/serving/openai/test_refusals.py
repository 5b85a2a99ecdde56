"""Bad requests: 400, an error object, the field as the caller wrote it."""

from collections.abc import Callable
from typing import Any

import pytest
from support.char_tokenizer import char_tokenizer
from support.toy_server import ToyServer

MakeToy = Callable[..., ToyServer]
TEXT, CHAT = "/completions", "/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def _parts(*parts: Any) -> list[dict[str, Any]]:
    return [*HI, {"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, 1.5]}, "prompt[1]"),
        ({"prompt": [[1, True]]}, "prompt[0][1]"),
        ({"prompt": [97]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 5000}, "n"),
        ({"n": 600, "prompt": ["a", "b"]}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 1000}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"97": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": [str(k) for k in range(100)]}, "stop"),
        ({"stop_token_ids": [97]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"allowed_token_ids": [97]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"priority": 2**40}, "priority"),
        ({"request_id": "a b"}, "request_id"),
        ({"suffix": "x"}, "suffix"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"temprature": 1}, "temprature"),
        ({"guided_json": {}}, "guided_json"),
        ({"messages": HI}, "messages"),
        ({"use_beam_search": True, "stop": "a"}, "stop"),
        ({"use_beam_search": True, "n": 33}, "n"),
        ({"use_beam_search": True, "best_of": 33}, "best_of"),
        ({"use_beam_search": True, "frequency_penalty": 1}, "frequency_penalty"),
        ({"use_beam_search": True, "length_penalty": 1e9}, "length_penalty"),
    ],
    ids=str,
)
def test_completions(fields: dict[str, Any], param: str, toy: MakeToy) -> None:
    error = toy().refused(TEXT, **{"prompt": "hi", **fields})
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [*HI, {"role": "robot", "content": "x"}]}, "messages[1].role"),
        ({"messages": _parts({"type": "vidéo"})}, "messages[1].content[0].type"),
        ({"messages": _parts({"text": "x"})}, "messages[1].content[0].type"),
        ({"messages": _parts({"type": "text"})}, "messages[1].content[0].text"),
        ({"messages": _parts({"type": "text", "text": 1})}, "messages[1].content[0].text"),
        (
            {
                "messages": _parts(
                    {"type": "text", "text": "x"},
                    {"type": "image_url", "image_url": {"url": "data:,"}},
                )
            },
            "messages[1].content[1].type",
        ),
        (
            {"messages": _parts({"type": "input_audio", "input_audio": {}})},
            "messages[1].content[0].type",
        ),
        ({"messages": _parts({"type": "file", "file": {}})}, "messages[1].content[0].type"),
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages[0].contents"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_tokens": 60}, "max_tokens"),
        ({"max_completion_tokens": 60}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 64}]}, "messages"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"prompt": "hi"}, "prompt"),
        ({"stop_token_ids": [97]}, "stop_token_ids"),
    ],
    ids=str,
)
def test_chats(fields: dict[str, Any], param: str, toy: MakeToy) -> None:
    error = toy().refused(CHAT, **{"messages": HI, **fields})
    assert error["param"] == param
    assert param in error["message"]


def test_another_model_is_a_404(toy: MakeToy) -> None:
    for path, own in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": HI})):
        answer = toy().post(path, {**own, "model": "gpt-9"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


def test_a_bad_prompt_among_several_runs_none(toy: MakeToy) -> None:
    server = toy()
    before = server.client.llm.stats().output_tokens
    server.refused(TEXT, prompt=[[1], [2], [300]])
    assert server.client.llm.stats().output_tokens == before
    assert server.client.llm.stats().waiting == 0


@pytest.mark.parametrize(
    ("body", "nearest"),
    [
        ({"prompt": "a", "temprature": 1}, "'temperature'"),
        ({"prompt": "a", "max_token": 1}, "'max_tokens'"),
        ({"prompt": "a", "stream_option": {}}, "'stream_options'"),
        ({"prompt": "a", "stream": True, "stream_options": {"usage": True}}, "'include_usage'"),
        ({"prompt": "a", "zzzzzz": 1}, "/openapi.json"),
        ({"prompt": "a", "x" * 5000: 1}, "/openapi.json"),
    ],
    ids=["typo", "singular", "nested", "part", "none", "huge"],
)
def test_unknown_fields_get_the_nearest_name(
    body: dict[str, Any], nearest: str, toy: MakeToy
) -> None:
    error = toy().refused(TEXT, **body)
    assert error["code"] == "unknown_parameter"
    assert nearest in error["message"]
    assert len(error["message"]) < 400


def test_unknown_fields_can_be_only_warned_of(
    toy: MakeToy, capsys: pytest.CaptureFixture[str]
) -> None:
    server = toy(unknown_fields="warn")
    messages = [{"role": "user", "content": "hi", "mood": "good"}]
    fields = {"messages": messages, "temprature": 1, "logit_bias": {"3": 100}, "max_tokens": 2}
    answer = server.whole(CHAT, **fields)
    assert answer["choices"][0]["message"]["content"] == "##"
    logged = capsys.readouterr().err
    assert "temprature: " in logged
    assert "messages[0].mood: " in logged
    assert server.refused(CHAT, messages=messages, n="x")["param"] == "n"
    many = {f"field{k}": 1 for k in range(100)}
    assert "unknown" in server.refused(CHAT, messages=messages, **many)["message"]


def test_a_model_without_chat_template_still_completes(toy: MakeToy) -> None:
    server = toy()
    server.client.llm._engine.tokenizer = char_tokenizer(template=None)
    error = server.refused(CHAT, messages=HI)
    assert error["param"] == "messages"
    assert "chat template" in error["message"]
    server.whole(TEXT, prompt="hi")


def test_a_model_without_tokenizer_takes_token_ids_only(toy: MakeToy) -> None:
    server = toy()
    server.client.llm._engine.tokenizer = None
    assert server.refused(TEXT, prompt="hi")["param"] == "prompt"
    assert server.refused(CHAT, messages=HI)["param"] == "messages"
    answer = server.whole(TEXT, prompt=[1, 2], max_tokens=3, return_token_ids=True, logprobs=1)
    assert answer["choices"][0]["text"] == ""
    assert len(answer["choices"][0]["token_ids"]) == 3

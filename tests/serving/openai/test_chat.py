"""/v1/chat/completions: prompts and answers against the offline LLM, streams against answers."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.char_tokenizer import TURN, text_of
from support.chunk_grammar import Streamed
from support.toy_device import toy_greedy
from support.toy_server import ToyServer, scripted_server

from ropeway.runtime.sampling.params import SamplingParams

MakeToy = Callable[..., ToyServer]
PATH = "/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def prompt_of(server: ToyServer, **fields: Any) -> list[int]:
    """The prompt's ids that a request leads to."""
    answer = server.whole(PATH, max_tokens=1, return_token_ids=True, **fields)
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    return list(answer["prompt_token_ids"])


def ids_of(text: str) -> list[int]:
    """Ids of a text in which # stands for the turn token."""
    return [TURN if char == "#" else ord(char) - 32 for char in text]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 5, "temperature": 0},
        {"max_completion_tokens": 5, "n": 3},
        {"max_completion_tokens": 6, "max_tokens": 6, "seed": 2},
        {"top_k": 3, "seed": 1, "max_tokens": 9},
        {"stop": ["a", "b"], "seed": 3},
    ],
    ids=lambda fields: "+".join(fields) or "defaults",
)
def test_an_answer_is_the_offline_answer(fields: dict[str, Any], toy: MakeToy) -> None:
    server = toy()
    fields = {"seed": 5, **fields}
    offline = {k: v for k, v in fields.items() if k != "max_completion_tokens"}
    wanted = fields.get("max_completion_tokens", fields.get("max_tokens"))
    [expected] = server.client.llm.chat(HI, SamplingParams(**offline | {"max_tokens": wanted}))
    answer = server.whole(PATH, messages=HI, **fields)
    assert answer["object"] == "chat.completion"
    for choice, output in zip(answer["choices"], expected.outputs, strict=True):
        assert choice["message"] == {
            "role": "assistant",
            "content": output.text,
            "refusal": None,
        }
        assert choice["finish_reason"] == output.finish_reason
        assert choice["stop_reason"] == output.stop_reason
    counted = sum(len(output.token_ids) for output in expected.outputs)
    assert answer["usage"]["completion_tokens"] == counted


def test_without_max_tokens_the_context_is_the_limit(toy: MakeToy) -> None:
    answer = toy().whole(PATH, messages=HI, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 64


def test_a_prompt_up_to_the_limit(toy: MakeToy) -> None:
    server = toy()
    around = len(prompt_of(server, messages=[{"role": "user", "content": ""}]))
    for length, fits in ((63 - around, True), (64 - around, False), (65 - around, False)):
        messages = [{"role": "user", "content": "x" * length}]
        if fits:
            assert server.whole(PATH, messages=messages)["usage"]["completion_tokens"] == 1
        else:
            error = server.refused(PATH, messages=messages)
            assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_prompts(toy: MakeToy) -> None:
    server = toy()
    assert prompt_of(server, messages=HI) == ids_of("#user: hi#")
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert prompt_of(server, messages=[{"role": "user", "content": parts}]) == ids_of("#user: hi#")
    assert prompt_of(server, messages=HI, add_generation_prompt=False) == ids_of("#user: hi")
    assert prompt_of(server, messages=HI, truncate_prompt_tokens=3) == ids_of("hi#")


def test_special_tokens_in_a_users_text_stay_text(toy: MakeToy) -> None:
    messages = [{"role": "user", "content": "<turn>"}]
    text = [TURN, *ids_of("user: <turn>"), TURN]
    assert prompt_of(toy(), messages=messages) == text
    special = prompt_of(toy(allow_special_tokens=True), messages=messages)
    assert special == ids_of("#user: ##")


def test_a_continued_message_is_left_open(toy: MakeToy) -> None:
    server = toy()
    for content in ("so ", "<turn>so", [{"type": "text", "text": "so "}]):
        messages = [*HI, {"role": "assistant", "content": content}]
        fields: dict[str, Any] = {"messages": messages, "continue_final_message": True}
        shown = content if isinstance(content, str) else "so "
        expected = [*ids_of("#user: hi#assistant: "), *ids_of(shown)]
        assert prompt_of(server, **fields) == expected
        answer = server.whole(PATH, **fields, max_tokens=3, temperature=0)
        text = text_of(toy_greedy(expected, 3, 97, stop=[95]))
        assert answer["choices"][0]["message"]["content"] == text
        echoed = server.whole(PATH, **fields, max_tokens=3, temperature=0, echo=True)
        assert echoed["choices"][0]["message"]["content"] == shown + text
        streamed = server.streamed(PATH, **fields, max_tokens=3, temperature=0, echo=True)
        assert streamed.choices[0].text == shown + text


def test_template_variables(toy: MakeToy) -> None:
    server = toy()
    settings_of = server.client.llm.tokenizer.settings
    server.client.llm.tokenizer.settings = msgspec.structs.replace(
        settings_of,
        chat_template="{{ mood }}{{ reasoning_effort }}{{ enable_thinking }}:"
        "{{ messages[0]['content'] }}",
    )
    for fields, expected in (
        ({}, ":hi"),
        ({"chat_template_kwargs": {"mood": "glad"}}, "glad:hi"),
        ({"reasoning_effort": "low"}, "low:hi"),
        ({"reasoning_effort": "none"}, "noneFalse:hi"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": 1}}, "none1:hi"),
    ):
        assert prompt_of(server, messages=HI, **fields) == ids_of(expected)


def test_logprobs(toy: MakeToy) -> None:
    server = toy()
    params = SamplingParams(max_tokens=6, seed=1, logprobs=2, ignore_eos=True)
    [expected] = server.client.llm.chat(HI, params)
    [output] = expected.outputs
    fields = {"max_tokens": 6, "seed": 1, "ignore_eos": True, "logprobs": True}
    answer = server.whole(PATH, messages=HI, **fields, top_logprobs=2)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert output.logprobs is not None
    for made, token, entry in zip(entries, output.token_ids, output.logprobs, strict=True):
        assert made["token"] == entry[token].decoded_token
        assert bytes(made["bytes"]).decode() == made["token"]
        assert made["logprob"] == entry[token].logprob
        best = sorted(entry.values(), key=lambda value: value.rank)[:2]
        tops = [(top["token"], top["logprob"]) for top in made["top_logprobs"]]
        assert tops == [(value.decoded_token, value.logprob) for value in best]
    plain = server.whole(PATH, messages=HI, **fields)
    assert [e["logprob"] for e in plain["choices"][0]["logprobs"]["content"]] == [
        e["logprob"] for e in entries
    ]
    assert all(e["top_logprobs"] == [] for e in plain["choices"][0]["logprobs"]["content"])


def test_bytes_of_logprobs_make_the_text(byte_toy: MakeToy) -> None:
    answer = byte_toy().whole(
        PATH, messages=HI, max_tokens=20, seed=4, logprobs=True, logit_bias={"2": -100}
    )
    [choice] = answer["choices"]
    raw = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    shown = raw.replace(b"<|endoftext|>", b"").replace(b"<|im_start|>", b"")
    assert shown.decode("utf-8", "replace") == choice["message"]["content"]
    assert "\ufffd" in choice["message"]["content"]


def test_best_of(toy: MakeToy) -> None:
    server = toy()
    params = SamplingParams(n=4, seed=1, logprobs=0, max_tokens=30)
    [expected] = server.client.llm.chat(HI, params)
    ranked = sorted(expected.outputs, key=lambda o: -(o.cumulative_logprob or 0) / len(o.token_ids))
    answer = server.whole(PATH, messages=HI, n=1, best_of=4, seed=1, max_tokens=30)
    assert [c["message"]["content"] for c in answer["choices"]] == [ranked[0].text]


_FIELDS = st.fixed_dictionaries(
    {
        "n": st.integers(1, 3),
        "seed": st.integers(0, 3),
        "max_tokens": st.integers(1, 16),
        "return_token_ids": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "ignore_eos": st.booleans(),
        "logprobs": st.booleans(),
    },
    optional={
        "stop": st.lists(st.text("abc \ufffd", min_size=1, max_size=2), min_size=1, max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "include_reasoning": st.booleans(),
        "stream_options": st.sampled_from([{}, {"continuous_usage_stats": True}]),
    },
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    fields=_FIELDS,
    steps=st.integers(1, 5),
    kind=st.sampled_from(["characters", "bytes"]),
    reasoning=st.sampled_from(["none", "think"]),
)
def test_a_stream_adds_up_to_the_whole_answer(
    fields: dict[str, Any],
    *,
    steps: int,
    kind: str,
    reasoning: str,
    toy: MakeToy,
    byte_toy: MakeToy,
) -> None:
    server = (toy if kind == "characters" else byte_toy)(steps=steps, reasoning_parser=reasoning)
    # The model's own words would hardly ever close a thought: the prompt opens it, a token ends it.
    messages = [*HI, {"role": "assistant", "content": "<think>"}]
    if reasoning == "think":
        fields = fields | {"continue_final_message": True}
        if kind == "bytes":
            end = server.client.llm.tokenizer.encode("</think>")
            assert len(end) == 1
            fields = fields | {"logit_bias": {str(end[0]): 4.0}}
    whole_fields = {k: v for k, v in fields.items() if k != "stream_options"}
    server.whole(PATH, messages=messages, **whole_fields)  # fills the prefix cache
    whole = server.whole(PATH, messages=messages, **whole_fields)
    check_same(server.streamed(PATH, messages=messages, **fields), whole)


def check_same(streamed: Streamed, whole: dict[str, Any]) -> None:
    """Asserts that a stream says what a whole answer says."""
    assert streamed.usage == whole["usage"]
    assert len(streamed.choices) == len(whole["choices"])
    for choice in whole["choices"]:
        made = streamed.choices[choice["index"]]
        message = choice["message"]
        assert made.text == (message["content"] or "")
        assert made.reasoning == message.get("reasoning_content", "")
        assert message.get("reasoning") == message.get("reasoning_content")
        calls = [
            {k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls", [])
        ]
        assert [{k: v for k, v in call.items() if k != "id"} for call in made.calls] == calls
        assert made.finish_reason == choice["finish_reason"]
        assert made.stop_reason == choice["stop_reason"]
        assert made.token_ids == choice.get("token_ids", [])
        entries = choice["logprobs"]["content"] if choice["logprobs"] else []
        assert made.logprobs == entries


TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("add", "sub")
]
SCRIPT = (
    "<think>They want sums: 1+2.</think>I'll look. "
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é🙂"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>'
)


@pytest.mark.parametrize("steps", [1, 3, 500])
def test_reasoning_content_and_calls(steps: int) -> None:
    server = scripted_server(
        SCRIPT, steps=steps, reasoning_parser="think", tool_call_parser="hermes"
    )
    fields: dict[str, Any] = {"messages": HI, "tools": TOOLS, "temperature": 0}
    whole = server.whole(PATH, **fields)
    [choice] = whole["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] == "They want sums: 1+2."
    assert message["content"].strip() == "I'll look."
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("add", {"a": 1, "b": "é🙂"}),
        ("sub", {}),
    ]
    assert choice["finish_reason"] == "tool_calls"
    thought = server.client.llm.tokenizer.encode("They want sums: 1+2.")
    details = whole["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len(thought)}
    streamed = server.streamed(PATH, **fields)
    check_same(streamed, whole)
    ids = [call["id"] for call in streamed.choices[0].calls]
    assert len(set(ids)) == 2
    hidden = server.whole(PATH, **fields, include_reasoning=False)
    assert "reasoning" not in hidden["choices"][0]["message"]
    assert hidden["usage"]["completion_tokens_details"] == details
    check_same(server.streamed(PATH, **fields, include_reasoning=False), hidden)


def test_without_tools_calls_are_text() -> None:
    server = scripted_server(SCRIPT, reasoning_parser="none", tool_call_parser="hermes")
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = server.whole(PATH, messages=HI, temperature=0, **fields)
        message = answer["choices"][0]["message"]
        assert message["content"] == SCRIPT
        assert "tool_calls" not in message
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_an_answer_that_is_cut_in_a_call_ends_by_length() -> None:
    server = scripted_server(SCRIPT, reasoning_parser="think", tool_call_parser="hermes")
    fields: dict[str, Any] = {"messages": HI, "tools": TOOLS, "temperature": 0}
    for limit in (30, 90, 110):
        whole = server.whole(PATH, **fields, max_tokens=limit)
        assert whole["choices"][0]["finish_reason"] == "length"
        check_same(server.streamed(PATH, **fields, max_tokens=limit), whole)


def test_functions_are_answered_in_their_own_way() -> None:
    server = scripted_server(SCRIPT, reasoning_parser="none", tool_call_parser="hermes")
    functions = [tool["function"] for tool in TOOLS]
    answer = server.whole(PATH, messages=HI, functions=functions, temperature=0)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"]["name"] == "add"
    assert json.loads(choice["message"]["function_call"]["arguments"])["a"] == 1
    assert "tool_calls" not in choice["message"]
    streamed = server.post(
        PATH, {"messages": HI, "functions": functions, "temperature": 0, "stream": True}
    )
    deltas = [
        json.loads(line[6:])["choices"][0]
        for line in streamed.text.splitlines()
        if line.startswith("data: {")
    ]
    parts = [d["delta"]["function_call"] for d in deltas if "function_call" in d["delta"]]
    assert parts[0]["name"] == "add"
    joined = "".join(part["arguments"] for part in parts)
    assert joined == choice["message"]["function_call"]["arguments"]
    assert deltas[-1]["finish_reason"] == "function_call"


def test_a_failure_in_a_stream_is_an_event(toy: MakeToy) -> None:
    answer = toy(fail_after=3).post(PATH, {"messages": HI, "stream": True, "max_tokens": 9})
    assert answer.status_code == 200
    assert "the engine is gone" in answer.text.split("\n\n")[-3]
    early = toy(fail_after=0).post(PATH, {"messages": HI, "stream": True})
    assert (early.status_code, early.json()["error"]["message"]) == (500, "the engine is gone")

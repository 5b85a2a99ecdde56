"""The validator that other tests rely on: it takes every right stream and no wrong one."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chunk_grammar import GrammarError, read_stream

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)
_REASONS = st.sampled_from(["stop", "length"])


@st.composite
def _streams(draw: st.DrawFn) -> tuple[list[Any], dict[str, Any], dict[int, str]]:
    """The chunks of a right stream, the request's options and the text of each choice."""
    chat, n = draw(st.booleans()), draw(st.integers(1, 3))
    usage = draw(st.booleans())
    frame = {
        "id": "x",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1,
        "model": "m",
    }
    nulls = {"usage": None} if usage else {}

    def chunk(choice: dict[str, Any]) -> dict[str, Any]:
        return {**frame, "choices": [choice], **nulls}

    def members(index: int, **own: Any) -> dict[str, Any]:
        return {"index": index, "logprobs": None, "finish_reason": None, **own}

    queues, texts = [], {}
    for index in range(n):
        parts = draw(st.lists(_TEXTS, max_size=3))
        texts[index] = "".join(parts)
        end = {"finish_reason": draw(_REASONS)}
        if chat:
            first = [members(index, delta={"role": "assistant", "content": ""})]
            middle = [members(index, delta={"content": part}) for part in parts]
            last = members(index, delta={}) | end
        else:
            first, middle = [], [members(index, text=part) for part in parts]
            last = members(index, text="") | end
        queues.append([chunk(one) for one in [*first, *middle, last]])
    chunks = []
    while any(queues):
        queue = draw(st.sampled_from([queue for queue in queues if queue]))
        chunks.append(queue.pop(0))
    if usage:
        counts = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        chunks.append({**frame, "choices": [], "usage": counts})
    return chunks, {"chat": chat, "n": n, "include_usage": usage}, texts


def _bytes(events: list[Any]) -> bytes:
    shown = [one if isinstance(one, str) else json.dumps(one) for one in events]
    return "".join(f"data: {one}\n\n" for one in shown).encode()


@given(_streams())
def test_takes_every_right_stream(stream: tuple[list[Any], dict[str, Any], dict[int, str]]) -> None:
    chunks, options, texts = stream
    read = read_stream(_bytes([*chunks, "[DONE]"]), **options)
    assert {index: choice.text for index, choice in read.choices.items()} == texts
    assert (read.usage is not None) == options["include_usage"]


@given(_streams(), st.data())
def test_refuses_a_lost_end_a_repeat_and_a_torn_event(
    stream: tuple[list[Any], dict[str, Any], dict[int, str]], data: st.DataObject
) -> None:
    chunks, options, _ = stream
    right = [*chunks, "[DONE]"]
    ends = [i for i, c in enumerate(chunks) if c["choices"] and c["choices"][0]["finish_reason"]]
    end = data.draw(st.sampled_from(ends))
    wrong = [
        chunks,  # no [DONE]
        [*right, "[DONE]"],
        [*right[:end], *right[end + 1 :]],
        [*right[: end + 1], right[end], *right[end + 1 :]],
        [*right[:end], {**chunks[end], "id": "other"} if end else "x", *right[end + 1 :]],
        [*right[:end], {"error": {"message": "broken"}}, *right[end:]],
    ]
    for events in wrong:
        with pytest.raises((GrammarError, KeyError, json.JSONDecodeError, TypeError)):
            read_stream(_bytes(events), **options)
    for raw in (_bytes(right)[:-1], _bytes(right).replace(b"\n\n", b"\n", 1), b"x" + _bytes(right)):
        with pytest.raises((GrammarError, json.JSONDecodeError)):
            read_stream(raw, **options)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"usage": None}, "usage, though none is wanted"),
        ({"object": "text_completion"}, "object"),
        ({"choices": []}, "a chunk without choice"),
    ],
)
def test_refuses_a_wrong_frame(change: dict[str, Any], why: str) -> None:
    good = {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
    }
    with pytest.raises(GrammarError, match=why):
        read_stream(_bytes([good | change, "[DONE]"]), chat=True)


def test_adds_up_calls() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"tool_calls": [_call(0, "a", "first")]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {"tool_calls": [_call(1, "b", "second")]},
        {},
    ]
    read = read_stream(_bytes([*_chat(deltas, "tool_calls"), "[DONE]"]), chat=True)
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in _calls(read)]
    assert calls == [("a", "first", '{"x": 1}'), ("b", "second", "")]


@pytest.mark.parametrize(
    "deltas",
    [
        [{"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}],
        [{"tool_calls": [{"index": 1, "id": "a", "type": "function", "function": {"name": "f"}}]}],
        [{"content": ""}],
        [{"role": "assistant", "content": "x"}],
    ],
)
def test_refuses_wrong_deltas(deltas: list[dict[str, Any]]) -> None:
    begun = [{"role": "assistant", "content": ""}, *deltas, {}]
    with pytest.raises(GrammarError):
        read_stream(_bytes([*_chat(begun, "stop"), "[DONE]"]), chat=True)


def _call(index: int, call_id: str, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": ""}
    return {"index": index, "id": call_id, "type": "function", "function": function}


def _chat(deltas: list[dict[str, Any]], reason: str) -> list[dict[str, Any]]:
    return [
        {
            "id": "x",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "delta": delta,
                    "logprobs": None,
                    "finish_reason": reason if k == len(deltas) - 1 else None,
                }
            ],
        }
        for k, delta in enumerate(deltas)
    ]


def _calls(read: Any) -> list[dict[str, Any]]:
    return list(read.choices[0].calls)

"""What a stream of completion chunks must look like, and what it adds up to.

Written from OpenAI's published schema and documentation alone; knows nothing of the server.
"""

import json
from dataclasses import dataclass, field
from typing import Any


class GrammarError(AssertionError):
    """The stream breaks a rule."""


@dataclass
class StreamedChoice:
    """What a choice's chunks add up to. Texts are None where none came."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)  # of a chat: the entries; else the objects
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    begun: bool = False


@dataclass
class Streamed:
    """A whole stream."""

    choices: dict[int, StreamedChoice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    chunks: list[dict[str, Any]] = field(default_factory=list)


def split_events(raw: bytes) -> list[str]:
    """The data of each event. Raises GrammarError unless every event is one "data: " line that a
    blank line ends, or a comment."""
    text = raw.decode("utf-8")
    _need(text.endswith("\n\n"), "the last event isn't closed")
    found = []
    for block in text[:-2].split("\n\n"):
        _need("\n" not in block, f"an event of several lines: {block!r}")
        if block.startswith(":"):
            continue
        _need(block.startswith("data: "), f"neither data nor a comment: {block!r}")
        found.append(block.removeprefix("data: "))
    return found


def read_stream(
    raw: bytes,
    *,
    chat: bool,
    n: int = 1,
    include_usage: bool = False,
    continuous_usage: bool = False,
) -> Streamed:
    """Checks a whole stream of a request with `n` choices in all. Raises GrammarError."""
    events = split_events(raw)
    _need(bool(events) and events[-1] == "[DONE]", "the stream doesn't end with [DONE]")
    _need(events.count("[DONE]") == 1, "[DONE] comes more than once")
    made = Streamed()
    for event in events[:-1]:
        chunk = json.loads(event)
        _need("error" not in chunk, f"an error in the stream: {chunk}")
        _need(made.usage is None, "a chunk after the one with the usage")
        _frame(chunk, made, chat)
        made.chunks.append(chunk)
        _usage(chunk, made, include_usage, continuous_usage)
        for choice in chunk["choices"]:
            _need(set(range(n)) >= {choice["index"]}, f"a choice {choice['index']} of {n}")
            state = made.choices.setdefault(choice["index"], StreamedChoice())
            _need(state.finish_reason is None, "a chunk after the choice's end")
            (_chat_choice if chat else _text_choice)(choice, state)
    _need(set(made.choices) == set(range(n)), f"choices {sorted(made.choices)}, not 0 to {n - 1}")
    for index, state in made.choices.items():
        _need(state.finish_reason is not None, f"choice {index} never ends")
    _need(not include_usage or made.usage is not None, "no chunk with the usage")
    return made


def _frame(chunk: dict[str, Any], made: Streamed, chat: bool) -> None:
    kind = "chat.completion.chunk" if chat else "text_completion"
    _need(chunk["object"] == kind, f"object {chunk['object']!r}, not {kind!r}")
    _need(isinstance(chunk["id"], str) and bool(chunk["id"]), "no id")
    _need(isinstance(chunk["created"], int), "no moment of creation")
    _need(isinstance(chunk["choices"], list) and len(chunk["choices"]) <= 1, "several choices")
    if made.chunks:
        for name in ("id", "created", "model"):
            _need(chunk[name] == made.chunks[0][name], f"{name} changes")


def _usage(chunk: dict[str, Any], made: Streamed, wanted: bool, continuous: bool) -> None:
    if not chunk["choices"]:
        _need(wanted, "a chunk without choice, though no usage is wanted")
        usage = chunk["usage"]
        total = usage["prompt_tokens"] + usage["completion_tokens"]
        _need(usage["total_tokens"] == total, f"the total isn't the sum: {usage}")
        made.usage = usage
    elif continuous:
        _need(isinstance(chunk.get("usage"), dict), "a chunk without usage")
    elif wanted:
        _need("usage" in chunk and chunk["usage"] is None, "usage isn't null before the last chunk")
    else:
        _need("usage" not in chunk, "usage, though none is wanted")


def _text_choice(choice: dict[str, Any], state: StreamedChoice) -> None:
    _need(isinstance(choice["text"], str), "text isn't text")
    _need("logprobs" in choice and "finish_reason" in choice, f"a member is missing: {choice}")
    state.begun = True
    state.text += choice["text"]
    state.token_ids += choice.get("token_ids") or []
    if choice["logprobs"] is not None:
        lengths = {len(values) for values in choice["logprobs"].values()}
        _need(len(lengths) == 1, f"lists of logprobs of several lengths: {lengths}")
        state.logprobs.append(choice["logprobs"])
    _end(choice, state, {"stop", "length"})


def _chat_choice(choice: dict[str, Any], state: StreamedChoice) -> None:
    delta = choice["delta"]
    _need("logprobs" in choice and "finish_reason" in choice, f"a member is missing: {choice}")
    if not state.begun:
        _need(delta.get("role") == "assistant", f"the first chunk has no role: {delta}")
        _need(not delta.get("content"), "the chunk with the role has text")
        state.begun = True
    else:
        _need("role" not in delta, "the role comes twice")
    state.token_ids += choice.get("token_ids") or []
    if choice["logprobs"] is not None:
        state.logprobs += choice["logprobs"]["content"]
    if "content" in delta and "role" not in delta:
        _need(isinstance(delta["content"], str) and bool(delta["content"]), "an empty text")
        state.text += delta["content"]
    if "reasoning_content" in delta:
        _need(delta["reasoning"] == delta["reasoning_content"], "two kinds of reasoning")
        state.reasoning += delta["reasoning_content"]
    for call in delta.get("tool_calls") or []:
        _call(call, state)
    if choice["finish_reason"] is not None:
        _need(delta == {}, f"the last chunk has a delta: {delta}")
    _end(choice, state, {"stop", "length", "tool_calls", "function_call"})


def _call(call: dict[str, Any], state: StreamedChoice) -> None:
    calls = state.calls
    if "id" in call:
        _need(call["index"] == len(calls), f"call {call['index']} begins after {len(calls)}")
        _need(call["type"] == "function" and bool(call["function"]["name"]), f"no name: {call}")
        _need(call["id"] not in {one["id"] for one in calls}, "an id comes twice")
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        calls.append({"id": call["id"], "type": "function", "function": function})
        return
    _need(call["index"] < len(calls), f"arguments of a call that never began: {call}")
    _need(set(call["function"]) == {"arguments"}, f"more than arguments: {call}")
    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]


def _end(choice: dict[str, Any], state: StreamedChoice, reasons: set[str]) -> None:
    reason = choice["finish_reason"]
    if reason is None:
        return
    _need(reason in reasons, f"finish_reason {reason!r}")
    _need(not choice.get("text"), "the last chunk has text")
    state.finish_reason = reason
    state.stop_reason = choice.get("stop_reason")


def _need(true: bool, otherwise: str) -> None:
    if not true:
        raise GrammarError(otherwise)

"""What a stream of /v1/responses must look like, and what it adds up to.

Written from OpenAI's published schema and documentation alone; knows nothing of the server.
"""

import json
from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

_event = TypeAdapter(ResponseStreamEvent)
_LAST = {"response.completed", "response.incomplete", "response.failed"}
_TEXTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


def read_events(raw: bytes) -> list[dict[str, Any]]:
    """The events. Each is named like its type, numbered from 0, and valid for the client."""
    text = raw.decode()
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        _event.validate_python(event)
        events.append(event)
    return events


def read_response(raw: bytes) -> dict[str, Any]:
    """The response that a stream ends with. AssertionError where the events break the grammar, or
    build other items than it has."""
    events = read_events(raw)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events[:2]:
        assert event["response"]["status"] == "in_progress"
        assert event["response"]["output"] == []
        assert event["response"]["usage"] is None
    assert events[-1]["type"] in _LAST
    assert not any(event["type"] in _LAST for event in events[:-1])
    response = dict(events[-1]["response"])
    assert events[-1]["type"] == f"response.{response['status']}"
    assert response["id"] == events[0]["response"]["id"]
    assert _items(events[2:-1]) == response["output"]
    return response


def _items(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the events build."""
    items: list[dict[str, Any]] = []
    rest = list(events)
    while rest:
        item = _take(rest, "response.output_item.added")
        assert item["output_index"] == len(items)
        items.append(_item(rest, item["item"], len(items)))
    return items


def _item(rest: list[dict[str, Any]], begun: dict[str, Any], index: int) -> dict[str, Any]:
    assert begun["status"] == "in_progress"
    place = {"item_id": begun["id"], "output_index": index}
    if begun["type"] == "function_call":
        assert begun["arguments"] == ""
        text = _deltas(rest, "response.function_call_arguments.delta", place)
        done = _take(rest, "response.function_call_arguments.done", **place)
        assert (done["arguments"], done["name"]) == (text, begun["name"])
        made = {**begun, "arguments": text}
    else:
        assert begun["content"] == []
        kind, place = _TEXTS[begun["type"]], {**place, "content_index": 0}
        part = _take(rest, "response.content_part.added", **place)["part"]
        assert part["text"] == ""
        text = _deltas(rest, f"{kind}.delta", place, part)
        done = _take(rest, f"{kind}.done", **place)
        assert done["text"] == text
        assert done.get("logprobs") == part.get("logprobs")
        part["text"] = text
        assert _take(rest, "response.content_part.done", **place)["part"] == part
        made = {**begun, "content": [part]}
    last = _take(rest, "response.output_item.done", output_index=index)["item"]
    assert last["status"] in ("completed", "incomplete")
    assert last == {**made, "status": last["status"]}
    return dict(last)


def _deltas(
    rest: list[dict[str, Any]],
    kind: str,
    place: dict[str, Any],
    part: dict[str, Any] | None = None,
) -> str:
    """The deltas' text; their logprobs are added to `part`."""
    text = ""
    while rest[0]["type"] == kind:
        delta = _take(rest, kind, **place)
        assert delta["delta"]
        text += delta["delta"]
        if part is not None and "logprobs" in delta:
            part["logprobs"] = part["logprobs"] + delta["logprobs"]
    return text


def _take(rest: list[dict[str, Any]], kind: str, **members: Any) -> dict[str, Any]:
    event = rest.pop(0)
    assert event["type"] == kind
    for name, value in members.items():
        assert event[name] == value
    return event

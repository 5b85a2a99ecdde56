"""Chunks of a stream as bytes: what doesn't change in a request is encoded once.

A chunk is frame + a choice's members + frame, and costs one join of bytes and the encoding of its
text.
"""

from typing import Any, Literal

import msgspec

from ropeway.serving.openai.usage import Usage

DONE = b"data: [DONE]\n\n"
FinishReason = Literal["stop", "length", "tool_calls"]

encode = msgspec.json.Encoder().encode


class Chunks:
    """The frame of one request's chunks, and its usage members.

    With `include_usage` every chunk has "usage", null until the last; `continuous` fills it in.
    """

    def __init__(
        self,
        answer_id: str,
        kind: Literal["text_completion", "chat.completion.chunk"],
        created: int,
        model: str,
        *,
        include_usage: bool = False,
        continuous: bool = False,
    ) -> None:
        head = encode({"id": answer_id, "object": kind, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._openings: dict[int, bytes] = {}
        self._close = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self.include_usage = include_usage
        self.continuous = include_usage and continuous

    def chunk(self, index: int, members: bytes, usage: Usage | None = None) -> bytes:
        """A chunk of choice `index`; `members` is the inside of a JSON object. `usage` so far,
        where it is wanted with every chunk."""
        opening = self._openings.get(index)
        if opening is None:
            opening = self._head + b'{"index":%d,' % index
            self._openings[index] = opening
        if usage is None:
            return opening + members + self._close
        return b"".join((opening, members, b'}],"usage":', encode(usage), b"}\n\n"))

    def last(self, usage: Usage) -> bytes:
        """The chunk with the request's usage, and no choice."""
        return self._head + b'],"usage":' + encode(usage) + b"}\n\n"


def members(**values: Any) -> bytes:
    """Members of a JSON object, in order, without its braces."""
    return encode(values)[1:-1]

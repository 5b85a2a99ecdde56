"""What a model's text is made of, once reasoning and tool calls are told apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins: its number in the answer, from 0, its id and the function's name."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: the texts of a call, joined, are its JSON."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class OutputParser(Protocol):
    """Reads one choice's text as it comes. The pieces don't depend on how the text was cut: the
    same text in one push or in many gives, joined, the same pieces."""

    def push(self, text: str) -> Sequence[Piece]:
        """Pieces that are certain now."""
        ...

    def finish(self) -> Sequence[Piece]:
        """What was held back; call once, when the choice has ended."""
        ...

    @property
    def called(self) -> bool:
        """Whether a tool call was found: finish_reason is then "tool_calls"."""
        ...


class PlainText:
    """All text is content."""

    called = False

    def push(self, text: str) -> Sequence[Piece]:
        """See OutputParser.push."""
        return [Content(text)] if text else []

    def finish(self) -> Sequence[Piece]:
        """See OutputParser.finish."""
        return []

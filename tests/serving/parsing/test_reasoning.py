"""Thinking told from the rest."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.answer_pieces import Joined, cut, places, read

from ropeway.serving.parsing.hermes import HermesParser
from ropeway.serving.parsing.pieces import OutputParser, PlainText
from ropeway.serving.parsing.reasoning import ThinkParser, is_open


def thinking(opened: bool) -> OutputParser:
    return ThinkParser(PlainText(), opened=opened)


def expected(text: str, opened: bool) -> Joined:
    """By one regular expression over the whole text."""
    begin = r"(?:\s*<think>)?" if opened else r"\s*<think>"
    found = re.fullmatch(
        rf"{begin}\s*(?P<thoughts>.*?)(?P<end>\s*</think>\s*(?P<rest>.*))?", text, re.S
    )
    if found is None:
        return [("content", text)] if text else []
    thoughts = found["thoughts"]
    made: Joined = [("reasoning", thoughts)] if thoughts else []
    return made + ([("content", found["rest"])] if found["rest"] else [])


parts = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "a", "\n", " ", "<", "é"]),
    max_size=10,
)


@settings(deadline=None)
@given(parts, st.booleans(), places)
def test_against_one_expression(parts: list[str], opened: bool, at: Any) -> None:
    text = "".join(parts)
    wanted = expected(text, opened)
    assert read(lambda: thinking(opened), [text]) == wanted
    assert read(lambda: thinking(opened), cut(text, at)) == wanted
    assert read(lambda: thinking(opened), list(text)) == wanted


def test_thinking_then_text_then_calls() -> None:
    text = '<think>\nhm <tool_call>\n</think>\n\nYes.\n<tool_call>{"name": "f"}</tool_call>'

    def make() -> OutputParser:
        return ThinkParser(HermesParser(lambda: "id", single=False), opened=False)

    wanted = [("reasoning", "hm <tool_call>"), ("content", "Yes."), ("call", "f", "{}")]
    assert read(make, [text]) == wanted
    assert read(make, list(text)) == wanted


def test_thoughts_are_told_while_they_come() -> None:
    parser = thinking(opened=True)
    told = [
        getattr(p, "text", "") for part in ("So", " it", " is </thi") for p in parser.push(part)
    ]
    assert told == ["So", " it", " is"]


@pytest.mark.parametrize(
    ("end", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("why <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<think>So I", True),
        ("<think>So</think> I", False),
        ("", False),
    ],
)
def test_whether_a_prompt_leaves_the_model_thinking(end: str, opened: bool) -> None:
    assert is_open(end) is opened

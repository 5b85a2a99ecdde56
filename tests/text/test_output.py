"""One sequence's text: tokens, stop strings, min_tokens and the last token together."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_tokenizers

from ropeway.compiler.errors import RequestError
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.runtime.text.output import TextOutput
from ropeway.runtime.text.tokenizer import Tokenizer

BYTE_LEVEL = tiny_tokenizers.byte_level()
SENTENCEPIECE = tiny_tokenizers.sentencepiece()


def run(
    tokenizer: Tokenizer, params: SamplingParams, ids: list[int]
) -> tuple[str, str | None, int]:
    """(text, stop, tokens used); checks that deltas and text agree."""
    output = TextOutput(tokenizer, params)
    joined = ""
    for used, token in enumerate(ids, 1):
        delta = output.push(token)
        joined += delta.text
        assert output.text == joined
        if delta.stop is not None:
            return joined, delta.stop, used
    delta = output.finish()
    assert output.text == joined + delta.text
    return output.text, delta.stop, len(ids)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(3, 402), max_size=20),
    stops=st.lists(
        st.sampled_from(["t", "he", "the c", "ไ", "ทย", "x<", "\ufffd", " "]), max_size=3
    ),
    include=st.booleans(),
)
def test_equals_decoding_everything_and_searching(
    ids: list[int], stops: list[str], include: bool
) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        params = SamplingParams(stop=stops, include_stop_str_in_output=include)
        text, stop, used = run(tokenizer, params, ids)
        whole = tokenizer.decode(ids)
        ends = [
            (at + len(s), at, s)
            for s in set(stops)
            for at in range(len(whole))
            if whole.startswith(s, at)
        ]
        if not ends:
            assert (text, stop, used) == (whole, None, len(ids))
            continue
        end, start, expected = min(ends)
        assert (text, stop) == (whole[: end if include else start], expected)
        assert len(tokenizer.decode(ids[:used])) >= end  # found in the token that completed it


def test_stop_inside_a_token_and_over_tokens() -> None:
    ids = BYTE_LEVEL.encode("the cat sat")
    assert len(ids) < 6
    assert run(BYTE_LEVEL, SamplingParams(stop="e c"), ids)[:2] == ("th", "e c")
    assert run(BYTE_LEVEL, SamplingParams(stop="h"), ids)[:2] == ("t", "h")


def test_min_tokens_holds_for_stop_strings() -> None:
    ids = BYTE_LEVEL.encode("x.x.x.x.")
    assert len(ids) == 8
    text, stop, used = run(BYTE_LEVEL, SamplingParams(stop=".", min_tokens=4), ids)
    assert (text, stop, used) == ("x.x.x", ".", 6)  # the token after four tokens is the fifth, "x"


@pytest.mark.parametrize(
    ("include", "skip", "expected"),
    [(False, True, "a"), (True, True, "a"), (False, False, "a"), (True, False, "a<|im_end|>")],
)
def test_the_end_token(include: bool, skip: bool, expected: str) -> None:
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip)
    output = TextOutput(BYTE_LEVEL, params)
    output.push(BYTE_LEVEL.encode("a")[0])
    output.finish(stop_token=2)
    assert output.text == expected


def test_a_plain_stop_token_shows_only_when_included() -> None:
    a, b = BYTE_LEVEL.encode("a") + BYTE_LEVEL.encode("b")
    for include, expected in ((False, "a"), (True, "ab")):
        output = TextOutput(BYTE_LEVEL, SamplingParams(include_stop_str_in_output=include))
        output.push(a)
        output.finish(stop_token=b)
        assert output.text == expected


def test_held_text_is_released_at_the_end() -> None:
    ids = BYTE_LEVEL.encode("the c")
    assert run(BYTE_LEVEL, SamplingParams(stop="cat"), ids) == ("the c", None, len(ids))


def test_without_text() -> None:
    for output in (
        TextOutput(None, SamplingParams()),
        TextOutput(BYTE_LEVEL, SamplingParams(detokenize=False)),
    ):
        assert output.push(5).text == "" and output.finish(stop_token=2).text == ""
        assert output.text == ""
    with pytest.raises(RequestError, match="stop"):
        TextOutput(None, SamplingParams(stop="x"))

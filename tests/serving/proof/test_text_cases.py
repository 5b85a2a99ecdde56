"""What went wrong in other servers with stop strings and characters, through HTTP."""

from typing import Any

import httpx
import pytest
from support.chunk_grammar import read_stream
from support.offline_answers import CHAT, TEXT, differences, offline_answers, served_answer

from ropeway import LLM

LETTERS = list(range(64, 90))  # a to z: the tokenizer's tokens are bytes
ASKED = {TEXT: {"prompt": "Say: "}, CHAT: {"messages": [{"role": "user", "content": "Say: "}]}}
SAMPLED: dict[str, Any] = {"seed": 6, "max_tokens": 40, "allowed_token_ids": LETTERS}


def answer(http: httpx.Client, path: str, body: dict[str, Any], choices: int) -> Any:
    """What the server says, whole or streamed."""
    given = http.post(path, json=body)
    assert given.status_code == 200, given.text
    return served_answer(path, body, given.content, choices)


def free_texts(offline: LLM, path: str, n: int) -> list[str]:
    """What is generated without stop strings."""
    [made] = offline_answers(offline, [(path, {**ASKED[path], **SAMPLED, "n": n})])
    return [choice.text for choice in made.choices]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_stop_over_several_tokens_is_cut_whole(
    path: str, stream: bool, n: int, offline: LLM, http: httpx.Client
) -> None:
    """Found though it spans tokens, and nothing of it comes out: not even its first half."""
    texts = free_texts(offline, path, n)
    stop = texts[-1][9:14]
    body = {**ASKED[path], **SAMPLED, "n": n, "stop": stop, "stream": stream}
    found = answer(http, path, body, n)
    assert [one.text for one in found.choices] == [text.partition(stop)[0] for text in texts]
    assert found.choices[-1].finish_reason == "stop"
    assert found.choices[-1].stop_reason == stop


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_what_only_begins_like_a_stop_comes_out(
    path: str, stream: bool, offline: LLM, http: httpx.Client
) -> None:
    [text] = free_texts(offline, path, 1)
    stops = [text[5:9] + "!", text[-3:] + "!", text[-1] + "?"]
    body = {**ASKED[path], **SAMPLED, "stop": stops, "stream": stream}
    [choice] = answer(http, path, body, 1).choices
    assert (choice.text, choice.finish_reason) == (text, "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_of_several_stops_the_first_in_the_text_counts(
    path: str, stream: bool, offline: LLM, http: httpx.Client
) -> None:
    [text] = free_texts(offline, path, 1)
    stops = [text[20:22], text[10:18], text[30:33]]
    first = min(stops, key=lambda stop: text.index(stop) + len(stop))
    body = {**ASKED[path], **SAMPLED, "stop": stops, "stream": stream}
    [choice] = answer(http, path, body, 1).choices
    assert choice.text == text[: text.index(first)]
    assert choice.stop_reason == first
    [kept] = answer(http, path, {**body, "include_stop_str_in_output": True}, 1).choices
    assert kept.text == text[: text.index(first) + len(first)]


def test_no_more_is_held_back_than_a_beginning_of_the_stop(
    offline: LLM, http: httpx.Client
) -> None:
    """Each chunk's text: all that was generated but for what may become the stop."""
    [text] = free_texts(offline, TEXT, 1)
    stop = text[6:8] + "!"
    body = {**ASKED[TEXT], **SAMPLED, "stop": stop, "stream": True, "return_token_ids": True}
    streamed = read_stream(http.post(TEXT, json=body).content, chat=False)
    sent, drawn = "", ""
    for chunk in streamed.chunks:
        [choice] = chunk["choices"]
        sent += choice["text"]
        drawn += offline.tokenizer.decode(choice.get("token_ids") or [])
        held = drawn.removeprefix(sent)
        assert sent + held == drawn
        if choice["finish_reason"] is None:
            longest = max(k for k in range(len(stop)) if drawn.endswith(stop[:k]))
            assert len(held) == longest, f"{held!r} is held back for {stop!r}"
    assert sent == text


SAID = "👩‍👩‍👧‍👦 กำลัง é 🙂 日本"  # ZWJ, Thai with marks, characters of two to four bytes


@pytest.mark.parametrize("length", range(1, len(SAID.encode()) + 1, 3))
def test_characters_of_several_tokens(length: int, offline: LLM, http: httpx.Client) -> None:
    """A text that is dictated byte by byte and cut anywhere: deltas never hold half a character,
    and add up to what is answered whole."""
    form = {"structured_outputs": {"choice": [SAID]}, "max_tokens": length, "temperature": 0}
    whole_characters = SAID.encode()[:length].decode(errors="ignore")
    for path in (TEXT, CHAT):
        body = {**ASKED[path], **form}
        [expected] = offline_answers(offline, [(path, body)])
        assert expected.choices[0].text.rstrip("\ufffd") == whole_characters
        for stream in (False, True):
            found = answer(http, path, {**body, "stream": stream}, 1)
            assert differences(expected, found) == []


def test_a_prompt_of_ids_that_ends_inside_a_character(offline: LLM, http: httpx.Client) -> None:
    """The first delta holds nothing of the prompt, and no more than offline."""
    encode = offline.tokenizer.encode
    for prompt in (encode("日本")[:-1], encode("ab🙂")[:-2], encode("é")[:1]):
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
        [expected] = offline_answers(offline, [(TEXT, body)])
        for stream in (False, True):
            found = answer(http, TEXT, {**body, "stream": stream}, 1)
            assert differences(expected, found) == []
    begun, rest = encode("ab🙂")[:-2], encode("🙂")[-2:]
    for k, wanted in ((1, ""), (2, "🙂")):  # the answer completes what the prompt began
        form = {"prompt": begun, "temperature": 0, "max_tokens": k, "ignore_eos": True}
        bias = {str(token): 100 for token in rest[:k]}
        body = {**form, "logit_bias": bias, "frequency_penalty": 2, "stream": True}
        [expected] = offline_answers(offline, [(TEXT, body)])
        assert differences(expected, answer(http, TEXT, body, 1)) == []
        assert "b" not in expected.choices[0].text, wanted

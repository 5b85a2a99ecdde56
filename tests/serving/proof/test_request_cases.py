"""What went wrong in other servers with odd requests, through HTTP: refused by name or answered."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.chunk_grammar import read_stream
from support.offline_answers import CHAT, TEXT, differences, offline_answers, served_answer
from support.server import RunningServer

from ropeway import LLM

VOCABULARY, LENGTH = 260, 512  # of the tiny model
HI = [{"role": "user", "content": "hi"}]
CANARY = {"prompt": "a canary", "seed": 4, "n": 2, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(autouse=True)
def unharmed(server: RunningServer, http: httpx.Client, offline: LLM) -> Iterator[None]:
    """After each test the same engine gives the right answer and holds nothing."""
    before = server.children()
    yield
    [expected] = offline_answers(offline, [(TEXT, CANARY)])
    answer = http.post(TEXT, json=CANARY)
    assert answer.status_code == 200, answer.text
    assert differences(expected, served_answer(TEXT, CANARY, answer.content, 2)) == []
    assert server.children() == before, "the engine died"
    engine = http.get("/live").json()["engine"]
    assert (engine["running"], engine["waiting"], engine["blocks_used"]) == (0, 0, 0)


def refused(http: httpx.Client, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error object of a request that must be refused."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "token", [VOCABULARY, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, -1, -(2**63)]
)
def test_token_ids_out_of_range(token: int, stream: bool, http: httpx.Client) -> None:
    for path, own in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": HI})):
        for field, value in (
            ("stop_token_ids", [1, token]),
            ("logit_bias", {str(token): 1}),
            ("allowed_token_ids", [1, token]),
        ):
            error = refused(http, path, {**own, field: value, "stream": stream})
            assert str(error["param"]).startswith(field), error
            assert field in error["message"]
    for prompt in ([1, token], [[1], [token]]):
        error = refused(http, TEXT, {"prompt": prompt, "stream": stream})
        assert str(error["param"]).startswith("prompt"), error


def test_ids_at_the_ends_of_the_vocabulary(offline: LLM, http: httpx.Client) -> None:
    last = VOCABULARY - 1
    body = {"prompt": [0, last], "stop_token_ids": [0, last], "logit_bias": {"0": -1, str(last): 1}}
    body |= {"temperature": 0, "max_tokens": 6}
    [expected] = offline_answers(offline, [(TEXT, body)])
    answer = http.post(TEXT, json=body)
    assert differences(expected, served_answer(TEXT, body, answer.content, 1)) == []


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens(stream: bool, offline: LLM, http: httpx.Client) -> None:
    """1 and 2 are exactly those; null is the default of OpenAI's; too many are refused."""
    free = {"ignore_eos": True, "temperature": 0, "stream": stream}
    free |= {"stream_options": {"include_usage": True}} if stream else {}
    for path, own, limit in (
        (TEXT, {"prompt": "abcd"}, 16),
        (CHAT, {"messages": HI}, LENGTH - 5),  # the template adds three tokens to "hi"
    ):
        for asked, made in ((1, 1), (2, 2), (None, limit)):
            body = {**own, **free, "max_tokens": asked}
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            found = served_answer(path, body, answer.content, 1)
            assert found.completion_tokens == made
            assert found.choices[0].finish_reason == "length"
            same = {**body, "max_tokens": made}
            [expected] = offline_answers(offline, [(path, same)])
            assert differences(expected, found) == []
        for wrong in (-1, LENGTH, 2**31, 2**64, 1.5, "2", True):
            assert (
                refused(http, path, {**own, **free, "max_tokens": wrong})["param"] == "max_tokens"
            )
    body = {"prompt": "abcd", "max_tokens": 0, "stream": stream}
    if not stream:
        whole = http.post(TEXT, json=body).json()
        assert (whole["choices"][0]["text"], whole["usage"]["completion_tokens"]) == ("", 0)
    assert refused(http, CHAT, {"messages": HI, "max_tokens": 0})["param"] == "max_tokens"


def test_empty_prompts(http: httpx.Client) -> None:
    for prompt in ("", [], [""], [[]], ["a", ""], [[1], []]):
        error = refused(http, TEXT, {"prompt": prompt})
        assert str(error["param"]).startswith("prompt"), error
    assert refused(http, CHAT, {"messages": []})["param"] == "messages"
    assert refused(http, TEXT, {})["param"] == "prompt"


@pytest.mark.parametrize("length", [LENGTH - 1, LENGTH, LENGTH + 1])
def test_prompts_about_as_long_as_the_context(
    length: int, offline: LLM, http: httpx.Client
) -> None:
    """One token more than the prompt fits, or nothing does; the default of 16 is asked for too."""
    prompt = [(7 * k) % 251 for k in range(length)]
    for own in ({"max_tokens": 1}, {"max_tokens": 2}, {"max_tokens": None}, {}):
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **own}
        if length < LENGTH and own == {"max_tokens": 1}:
            answer = http.post(TEXT, json=body)
            [expected] = offline_answers(offline, [(TEXT, body)])
            assert differences(expected, served_answer(TEXT, body, answer.content, 1)) == []
            continue
        error = refused(http, TEXT, body)
        assert error["code"] == "context_length_exceeded"
        assert str(LENGTH) in error["message"]
        assert error["param"] == ("prompt" if length >= LENGTH else "max_tokens")
    messages = [{"role": "user", "content": "x" * (length - 3)}]  # three tokens of the template
    body = {"messages": messages, "temperature": 0, "ignore_eos": True}
    if length >= LENGTH:
        assert refused(http, CHAT, body)["param"] == "messages"
    else:
        made = http.post(CHAT, json=body).json()["usage"]
        assert (made["prompt_tokens"], made["completion_tokens"]) == (LENGTH - 1, 1)


def test_unknown_fields_are_refused_with_the_nearest_name(http: httpx.Client) -> None:
    for path, own in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": HI})):
        for wrong, right in (
            ("temprature", "temperature"),
            ("max_token", "max_tokens"),
            ("topk", "top_k"),
            ("Stop", "stop"),
        ):
            error = refused(http, path, {**own, wrong: 1})
            assert (error["param"], error["code"]) == (wrong, "unknown_parameter")
            assert repr(right) in error["message"]


BODIES = {
    "latin-1": b'{"prompt": "caf\xe9"}',
    "lone surrogate, raw": b'{"prompt": "\xed\xa0\xbd"}',
    "lone surrogate, escaped": b'{"prompt": "a\\ud83d"}',
    "swapped surrogates": b'{"prompt": "\\ude00\\ud83d"}',
    "NUL": b'{"prompt": "a\x00b"}',
    "NUL, escaped": b'{"prompt": "a\\u0000b"}',
    "deep": b'{"prompt": ' + b"[" * 100_000,
    "deep object": b'{"messages":' * 300 + b"1" + b"}" * 300,
    "cut off": b'{"prompt": "a"',
    "two values": b'{"prompt": "a"} {"prompt": "b"}',
    "a list": b'[{"prompt": "a"}]',
    "null": b"null",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinite": b'{"prompt": "a", "temperature": 1e999}',
    "huge number": b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_no_requests(name: str, http: httpx.Client) -> None:
    for path in (TEXT, CHAT, "/v1/responses", "/tokenize", "/detokenize"):
        refused(http, path, BODIES[name])


@pytest.mark.parametrize("wrong", [None, 5, "x", True, [], {}, [None], {"a": {}}], ids=repr)
def test_wrong_types_name_their_field(wrong: Any, http: httpx.Client) -> None:
    """Whatever the type: answered, or a 400 with that field's name."""
    document = http.get("/openapi.json").json()["components"]["schemas"]
    for path, own, schema in (
        (TEXT, {"prompt": "a"}, "CompletionRequest"),
        (CHAT, {"messages": HI}, "ChatRequest"),
    ):
        for field in document[schema]["properties"]:
            body = {"max_tokens": 1, **own, field: wrong}
            answer = http.post(path, json=body)
            if answer.status_code == 200:
                continue
            error = answer.json()["error"]
            assert answer.status_code in (400, 404), f"{field}: {answer.text[:300]}"
            if answer.status_code == 400 and field != "stream_options":
                assert field in (error["message"] + str(error["param"])), f"{field}: {error}"


def test_stream_options(offline: LLM, http: httpx.Client) -> None:
    """{} asks for nothing; include_usage adds one chunk, with the usage of the whole answer."""
    for path, own in ((TEXT, {"prompt": "ab"}), (CHAT, {"messages": HI})):
        body = {**own, "seed": 1, "n": 2, "max_tokens": 7, "stop_token_ids": list(range(40))}
        whole = http.post(path, json=body).json()["usage"]
        [expected] = offline_answers(offline, [(path, body)])
        assert whole["completion_tokens"] == expected.completion_tokens
        for options in (None, {}, {"include_usage": False}, {"include_usage": True}):
            wanted = bool(options and options.get("include_usage"))
            asked = {**body, "stream": True, "stream_options": options}
            streamed = read_stream(
                http.post(path, json=asked).content, chat=path == CHAT, n=2, include_usage=wanted
            )
            if wanted:
                assert streamed.usage is not None
                for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                    assert streamed.usage[name] == whole[name]
        assert refused(http, path, {**body, "stream_options": {}})["param"] == "stream_options"


GRAMMARS: dict[str, dict[str, Any]] = {
    "open regex": {"structured_outputs": {"regex": "(a"}},
    "lookbehind": {"structured_outputs": {"regex": "(?<=a)b"}},
    "no such rule": {"structured_outputs": {"grammar": "start: nothing"}},
    "not a grammar": {"structured_outputs": {"grammar": "}{"}},
    "endless": {"structured_outputs": {"grammar": "start: start"}},
    "no choice": {"structured_outputs": {"choice": []}},
    "no schema": {"structured_outputs": {"json": "{"}},
    "no such type": {"structured_outputs": {"json": {"type": "nothing"}}},
    "no such reference": {"structured_outputs": {"json": {"$ref": "#/$defs/a"}}},
    "impossible": {"structured_outputs": {"json": {"type": "integer", "minimum": 5, "maximum": 4}}},
    "too large": {"structured_outputs": {"regex": "a" * (33 << 10)}},
    "format": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "object", "properties": 5}},
        }
    },
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_that_cant_be_compiled(name: str, http: httpx.Client) -> None:
    """Never served unconstrained, never the engine's end; streamed too it is a status."""
    for path, own in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": HI})):
        for stream in (False, True):
            error = refused(http, path, {**own, **GRAMMARS[name], "stream": stream})
            assert str(error["param"]).startswith(next(iter(GRAMMARS[name]))), error


def test_a_seed_means_the_same_anywhere(offline: LLM, http: httpx.Client) -> None:
    """Alone, among others at any place, after a hit in the prefix cache, and as n choices, which
    differ from each other."""
    prompt = [(11 * k) % 250 for k in range(70)]
    alone = {"prompt": prompt, "seed": 42, "max_tokens": 20, "temperature": 1.2}
    [expected] = offline_answers(offline, [(TEXT, alone)])
    right = expected.choices[0].text
    for _ in range(2):  # the second hits
        answer = http.post(TEXT, json=alone).json()
        assert answer["choices"][0]["text"] == right
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
    others = [[k, k + 1, k + 2] for k in range(6)]
    for place in range(7):
        batch = [*others[:place], prompt, *others[place:]]
        made = http.post(TEXT, json={**alone, "prompt": batch}).json()["choices"]
        assert made[place]["text"] == right
    three = {**alone, "n": 3}
    texts = [[one["text"] for one in http.post(TEXT, json=three).json()["choices"]] for _ in "ab"]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    assert texts[0][0] == right

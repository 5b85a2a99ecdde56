"""Whatever a request holds: an answer or an error object, never a 5xx, and neighbours untouched."""

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.char_tokenizer import END, text_of
from support.toy_device import toy_greedy
from support.toy_server import ToyServer

from ropeway.serving.openai.fields import CompletionRequest
from ropeway.serving.openai.messages import ChatRequest

MakeToy = Callable[..., ToyServer]

_NUMBERS = st.one_of(
    st.integers(-3, 100),
    st.sampled_from([2**31, 2**53, 2**63, 2**64, 10**30, -(2**63), 1.5, -0.0, 1e308, 1e-320]),
)
_TEXTS = st.one_of(
    st.sampled_from(["", "a", "user", "assistant", "auto", "text", "json_object", "<end>", "\x00"]),
    st.text(max_size=4),
)
_ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(
                _TEXTS,
                st.sampled_from(
                    ["role", "content", "type", "text", "1", "regex", "choice", "json"]
                ),
            ),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)
# Most values are of the kind that the field wants, else hardly a request would get far.
_LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.one_of(
        _TEXTS,
        st.lists(st.integers(-1, 98), max_size=5),
        st.lists(st.one_of(_TEXTS, st.lists(st.integers(0, 96), max_size=3)), max_size=3),
    ),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"])},
            optional={
                "content": st.one_of(
                    _TEXTS,
                    st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": _TEXTS})),
                    st.none(),
                ),
                "name": _TEXTS,
                "tool_call_id": _TEXTS,
                "reasoning_content": _TEXTS,
            },
        ),
        min_size=1,
        max_size=3,
    ),
    "stream": st.booleans(),
    "n": st.integers(1, 4),
    "best_of": st.integers(1, 4),
    "max_tokens": st.integers(0, 20),
    "stop": st.lists(st.text("abc", min_size=1, max_size=2), max_size=2),
    "logit_bias": st.dictionaries(st.integers(0, 98).map(str), st.integers(-100, 100), max_size=2),
    "model": st.just("toy"),
}


def _bodies(kind: type[msgspec.Struct], needed: str) -> st.SearchStrategy[dict[str, Any]]:
    names = sorted(field.encode_name for field in msgspec.structs.fields(kind))
    # What the toy can't do: another test asks a real engine for forms.
    names = [n for n in names if n not in {needed, "structured_outputs", "response_format"}]

    @st.composite
    def bodies(draw: st.DrawFn) -> dict[str, Any]:
        body = {needed: draw(_LIKELY[needed])} if draw(st.integers(0, 9)) else {}
        for name in draw(st.lists(st.sampled_from(names), max_size=5, unique=True)):
            usual = _LIKELY.get(name, st.one_of(st.booleans(), _NUMBERS, _TEXTS, st.none()))
            body[name] = draw(usual if draw(st.integers(0, 3)) else _ANYTHING)
        return body

    return bodies()


def _check(server: ToyServer, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, body)
    assert answer.status_code in {200, 400, 404}, (body, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"]
    elif body.get("stream") is True:
        assert b'"error"' not in answer.content
        assert answer.content.endswith(b"data: [DONE]\n\n")
    canary = server.whole("/completions", prompt="canary", temperature=0, max_tokens=8)
    assert canary["choices"][0]["text"] == _canary(server)
    stats = server.client.llm.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


def _canary(server: ToyServer) -> str:
    return text_of(toy_greedy([ord(c) - 32 for c in "canary"], 8, 97, stop=[END]))


_SETTINGS = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@_SETTINGS
@given(body=_bodies(CompletionRequest, "prompt"))
def test_completions(body: dict[str, Any], toy: MakeToy) -> None:
    _check(toy(), "/completions", body)


@_SETTINGS
@given(body=_bodies(ChatRequest, "messages"))
def test_chats(body: dict[str, Any], toy: MakeToy) -> None:
    _check(toy(), "/chat/completions", body)

"""/v1/completions: each value against the offline LLM, and streams against whole answers."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.char_tokenizer import END, text_of
from support.chunk_grammar import Streamed
from support.toy_server import ToyServer

from ropeway.runtime.outputs import Logprobs
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.serving.openai.completion_answer import CompletionJob
from ropeway.serving.openai.completion_stream import stream_completion
from ropeway.serving.openai.fields import CompletionRequest
from ropeway.serving.openai.prompts import Prompt
from ropeway.serving.process.generation import Submission

MakeToy = Callable[..., ToyServer]
PATH = "/completions"


def ids_of(text: str) -> list[int]:
    """The toy's ids of a printable text."""
    return [ord(char) - 32 for char in text]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 5, "temperature": 0},
        {"n": 3, "seed": 7},
        {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 1},
        {"frequency_penalty": 1.5, "presence_penalty": -1, "repetition_penalty": 1.2, "seed": 2},
        {"logit_bias": {"40": 100.0}, "max_tokens": 4},
        {"stop_token_ids": [13], "logit_bias": {"13": 100}},
        {"ignore_eos": True, "logit_bias": {str(END): 100}},
        {"min_tokens": 6, "logit_bias": {str(END): 100}, "seed": 3},
        {"logit_bias": {str(END): 100}, "skip_special_tokens": False, "min_tokens": 2},
        {"allowed_token_ids": [1, 2, 3], "seed": 4},
    ],
    ids=lambda fields: "+".join(fields) or "defaults",
)
def test_every_parameter_means_what_it_means_offline(fields: dict[str, Any], toy: MakeToy) -> None:
    server = toy()
    offline = dict(fields)
    if "logit_bias" in offline:
        offline["logit_bias"] = {int(k): float(v) for k, v in offline["logit_bias"].items()}
    fields.setdefault("seed", 5)
    offline.setdefault("seed", 5)
    [expected] = server.client.llm.generate("hello", SamplingParams(**offline))
    answer = server.whole(PATH, prompt="hello", **fields, return_token_ids=True)
    for choice, wanted in zip(answer["choices"], expected.outputs, strict=True):
        assert choice["index"] == wanted.index
        assert choice["text"] == wanted.text
        assert choice["token_ids"] == wanted.token_ids
        assert choice["finish_reason"] == wanted.finish_reason
        assert choice["stop_reason"] == wanted.stop_reason
        assert choice["prompt_token_ids"] == ids_of("hello")
    tokens = sum(len(one.token_ids) for one in expected.outputs)
    usage = answer["usage"]
    counts = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
    assert counts == (5, tokens, 5 + tokens)


def test_kinds_of_prompts(toy: MakeToy) -> None:
    server = toy()
    fields = {"temperature": 0, "max_tokens": 6}
    texts = ["hello", "world", "abc"]
    one = [server.whole(PATH, prompt=text, **fields)["choices"][0]["text"] for text in texts]
    listed = server.whole(PATH, prompt=texts, **fields)
    assert [c["text"] for c in listed["choices"]] == one
    assert [c["index"] for c in listed["choices"]] == [0, 1, 2]
    assert listed["usage"]["prompt_tokens"] == 13
    ids = server.whole(PATH, prompt=ids_of("hello"), **fields)
    assert ids["choices"][0]["text"] == one[0]
    mixed = server.whole(PATH, prompt=["hello", ids_of("world"), ids_of("abc")], **fields)
    assert [c["text"] for c in mixed["choices"]] == one


def test_several_prompts_with_several_choices_keep_their_order(toy: MakeToy) -> None:
    server = toy()
    fields = {"n": 2, "seed": 3, "max_tokens": 4}
    both = server.whole(PATH, prompt=["ab", "cd"], **fields)
    single = [server.whole(PATH, prompt=text, **fields)["choices"] for text in ("ab", "cd")]
    texts = [choice["text"] for choices in single for choice in choices]
    assert [c["text"] for c in both["choices"]] == texts
    assert [c["index"] for c in both["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4


def test_max_tokens(toy: MakeToy) -> None:
    server = toy()

    def count(**fields: Any) -> int:
        fields = {"ignore_eos": True, "temperature": 0, **fields}
        return int(server.whole(PATH, **fields)["usage"]["completion_tokens"])

    assert count(prompt="hello") == 16
    assert count(prompt="hello", max_tokens=None) == 16
    assert [count(prompt="hello", max_tokens=k) for k in (1, 2)] == [1, 2]
    assert count(prompt="x" * 63, max_tokens=1) == 1
    assert count(prompt="hello", max_tokens=59) == 59
    for fields in (
        {"prompt": "hello", "max_tokens": 60},
        {"prompt": "hello", "max_tokens": 10**30},
        {"prompt": "x" * 63, "max_tokens": 2},
    ):
        error = server.refused(PATH, **fields)
        assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
        assert "64" in error["message"]
    for length in (64, 65):
        error = server.refused(PATH, prompt="x" * length, max_tokens=1)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_max_tokens_zero_scores_the_prompt(toy: MakeToy) -> None:
    server = toy()
    [expected] = server.client.llm.generate("hello", SamplingParams(prompt_logprobs=2))
    answer = server.whole(PATH, prompt="hello", max_tokens=0, echo=True, logprobs=2)
    [choice] = answer["choices"]
    assert choice["text"] == "hello"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert expected.prompt_logprobs is not None
    scores = [e and e[token].logprob for e, token in _with(expected.prompt_logprobs, "hello")]
    assert choice["logprobs"]["token_logprobs"] == scores
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["tokens"] == list("hello")
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert server.whole(PATH, prompt="hello", max_tokens=0)["choices"][0]["text"] == ""
    streamed = server.streamed(PATH, prompt="hello", max_tokens=0, echo=True, logprobs=2)
    assert streamed.choices[0].text == "hello"
    assert streamed.choices[0].logprobs == [choice["logprobs"]]
    assert streamed.usage == answer["usage"]


def _with(entries: list[Logprobs | None], text: str) -> list[tuple[Logprobs | None, int]]:
    return list(zip(entries, ids_of(text), strict=True))


def test_logprobs_are_those_of_the_offline_answer(toy: MakeToy) -> None:
    server = toy()
    [expected] = server.client.llm.generate(
        "hello", SamplingParams(logprobs=3, max_tokens=8, seed=1, ignore_eos=True)
    )
    fields = {"prompt": "hello", "max_tokens": 8, "seed": 1, "ignore_eos": True}
    made = server.whole(PATH, **fields, logprobs=3)["choices"][0]["logprobs"]
    [output] = expected.outputs
    assert output.logprobs is not None
    names = ["<end>", "<turn>"]
    texts = [(text_of([t]) or names[t - 95]) for t in output.token_ids]
    assert made["tokens"] == texts
    pairs = list(zip(output.token_ids, output.logprobs, strict=True))
    assert made["token_logprobs"] == [entry[token].logprob for token, entry in pairs]
    for top, (token, entry) in zip(made["top_logprobs"], pairs, strict=True):
        three = sorted(entry.values(), key=lambda value: value.rank)[:3]
        wanted = {value.decoded_token: value.logprob for value in [*three, entry[token]]}
        assert top == wanted
        assert list(top.values()) == sorted(top.values(), reverse=True)
    # A special token isn't shown, so what follows begins where it would have.
    shown = [len(text_of([t])) for t in output.token_ids]
    assert made["text_offset"] == [sum(shown[:k]) for k in range(len(shown))]
    chosen = server.whole(PATH, **fields, logprobs=0)["choices"][0]["logprobs"]
    assert chosen["token_logprobs"] == made["token_logprobs"]
    assert all(len(top) == 1 for top in chosen["top_logprobs"])
    ids = server.whole(PATH, **fields, logprobs=0, return_tokens_as_token_ids=True)
    tokens = ids["choices"][0]["logprobs"]["tokens"]
    assert tokens == [f"token_id:{token}" for token in output.token_ids]


def test_prompt_logprobs(toy: MakeToy) -> None:
    server = toy()
    [expected] = server.client.llm.generate("abc", SamplingParams(prompt_logprobs=1))
    answer = server.whole(PATH, prompt="abc", prompt_logprobs=1, echo=True, logprobs=4)
    made = answer["choices"][0]["prompt_logprobs"]
    assert made[0] is None
    assert expected.prompt_logprobs is not None
    for shown, entry in zip(made[1:], expected.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert shown == {
            str(token): {"logprob": v.logprob, "rank": v.rank, "decoded_token": v.decoded_token}
            for token, v in entry.items()
        }


def test_echo_of_token_ids_and_of_a_truncated_prompt(toy: MakeToy) -> None:
    server = toy()
    fields = {"echo": True, "max_tokens": 3, "temperature": 0}
    whole = server.whole(PATH, prompt=ids_of("lo w"), **fields)["choices"][0]["text"]
    assert whole.startswith("lo w")
    for keep in (4, 7):
        cut = server.whole(PATH, prompt="hello w", truncate_prompt_tokens=keep, **fields)
        assert cut["choices"][0]["text"] == (whole if keep == 4 else "hello w" + whole_of(server))
        assert cut["usage"]["prompt_tokens"] == keep
    longest = server.whole(PATH, prompt="x" * 200, truncate_prompt_tokens=-1, **fields)
    assert longest["usage"]["prompt_tokens"] == 64 - 3
    assert server.refused(PATH, prompt="hello", truncate_prompt_tokens=0)["param"] == "prompt"


def whole_of(server: ToyServer) -> str:
    """The greedy three tokens after "hello w"."""
    [output] = server.client.llm.generate("hello w", SamplingParams(max_tokens=3, temperature=0))
    return output.outputs[0].text


def test_best_of_keeps_the_likeliest_and_counts_all(toy: MakeToy) -> None:
    server = toy()
    [all_five] = server.client.llm.generate(
        "hello", SamplingParams(n=5, seed=1, logprobs=0, max_tokens=40)
    )
    lengths = {len(o.token_ids) for o in all_five.outputs}
    assert len(lengths) > 1, "lengths must differ, or a mean is as good as a sum"
    ranked = sorted(
        all_five.outputs,
        key=lambda output: (output.cumulative_logprob or 0) / len(output.token_ids),
        reverse=True,
    )
    answer = server.whole(PATH, prompt="hello", n=2, best_of=5, seed=1, max_tokens=40)
    assert [c["text"] for c in answer["choices"]] == [o.text for o in ranked[:2]]
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert all(c["logprobs"] is None for c in answer["choices"])
    counted = sum(len(o.token_ids) for o in all_five.outputs)
    assert answer["usage"]["completion_tokens"] == counted


def test_cached_tokens_and_salts(toy: MakeToy) -> None:
    server = toy()

    def cached(**fields: Any) -> int:
        answer = server.whole(PATH, prompt="x" * 21, max_tokens=1, **fields)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached()] == [0, 20]  # blocks of four tokens
    assert [cached(cache_salt="a"), cached(cache_salt="a")] == [0, 20]


def test_stop_strings_over_several_tokens(toy: MakeToy) -> None:
    server = toy()
    [free] = server.client.llm.generate("hello", SamplingParams(max_tokens=12, temperature=0))
    text = free.outputs[0].text
    stop = text[4:7]
    for include in (False, True):
        fields = {"stop": ["~~", stop], "include_stop_str_in_output": include}
        answer = server.whole(PATH, prompt="hello", max_tokens=12, temperature=0, **fields)
        [choice] = answer["choices"]
        assert choice["text"] == (text[:7] if include else text[:4])
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


# -- streams ---------------------------------------------------------------------------------

_FIELDS = st.fixed_dictionaries(
    {
        "n": st.integers(1, 3),
        "seed": st.integers(0, 3),
        "max_tokens": st.integers(0, 12),
        "echo": st.booleans(),
        "return_token_ids": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "ignore_eos": st.booleans(),
    },
    optional={
        "logprobs": st.integers(0, 3),
        "stop": st.lists(st.text("abc \ufffd", min_size=1, max_size=2), min_size=1, max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "min_tokens": st.just(0),
    },
)
_PROMPTS = st.sampled_from(
    [[40, 41, 42], [[70, 71], [72]], [[226, 150], [150, 70, 71]], [[33, 34, 35, 36, 37]]]
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    fields=_FIELDS,
    prompt=_PROMPTS,
    steps=st.integers(1, 5),
    kind=st.sampled_from(["characters", "bytes"]),
)
def test_a_stream_adds_up_to_the_whole_answer(
    fields: dict[str, Any],
    prompt: Any,
    *,
    steps: int,
    kind: str,
    toy: MakeToy,
    byte_toy: MakeToy,
) -> None:
    server = (toy if kind == "characters" else byte_toy)(steps=steps)
    prompt = [one if isinstance(one, int) else [t % server.vocab for t in one] for one in prompt]
    server.whole(PATH, prompt=prompt, **fields)  # fills the prefix cache: usages then agree
    whole = server.whole(PATH, prompt=prompt, **fields)
    streamed = server.streamed(PATH, prompt=prompt, **fields)
    check_same(streamed, whole)


def check_same(streamed: Streamed, whole: dict[str, Any]) -> None:
    """Asserts that a stream says what a whole answer says."""
    assert streamed.usage == whole["usage"]
    assert len(streamed.choices) == len(whole["choices"])
    for choice in whole["choices"]:
        made = streamed.choices[choice["index"]]
        assert made.text == choice["text"]
        assert made.finish_reason == choice["finish_reason"]
        assert made.stop_reason == choice["stop_reason"]
        assert made.token_ids == choice.get("token_ids", [])
        if choice["logprobs"] is None:
            assert not made.logprobs
            continue
        for name, values in choice["logprobs"].items():
            assert [value for part in made.logprobs for value in part[name]] == values


def test_tokens_that_came_together_are_one_chunk(toy: MakeToy) -> None:
    for steps, chunks in ((1, 12), (4, 3), (12, 1)):
        fields = {"prompt": "hello", "max_tokens": 12, "logit_bias": {"95": -100, "96": -100}}
        streamed = toy(steps=steps).streamed(PATH, **fields)
        texts = [c for c in streamed.chunks if c["choices"] and c["choices"][0]["text"]]
        assert len(texts) == chunks


def test_continuous_usage_counts_up(toy: MakeToy) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = toy().streamed(
        PATH, prompt="hello", max_tokens=4, temperature=0, ignore_eos=True, stream_options=options
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in streamed.chunks]
    assert counts == [1, 2, 3, 4, 4, 4]
    assert {chunk["usage"]["prompt_tokens"] for chunk in streamed.chunks} == {5}


def test_the_callers_id(toy: MakeToy) -> None:
    server = toy()
    answer = server.whole(PATH, prompt="a", max_tokens=1, request_id="my.id:1")
    assert answer["id"] == "cmpl-my.id:1"
    streamed = server.streamed(PATH, prompt="a", max_tokens=1, request_id="my.id:2")
    assert {chunk["id"] for chunk in streamed.chunks} == {"cmpl-my.id:2"}
    ids = {server.whole(PATH, prompt="a", max_tokens=1)["id"] for _ in range(3)}
    assert len(ids) == 3


def test_without_options_a_stream_has_no_usage(toy: MakeToy) -> None:
    continuous = {"stream_options": {"continuous_usage_stats": True}}
    for options in ({}, {"stream_options": {}}, {"stream_options": None}, continuous):
        answer = toy().post(PATH, {"prompt": "a", "stream": True, "max_tokens": 2, **options})
        assert b"usage" not in answer.content
        assert answer.content.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("prompt", ["hello", ["hello", "world", "again"]], ids=["one", "three"])
def test_a_stream_that_is_closed_aborts_what_runs(prompt: Any, toy: MakeToy) -> None:
    client = toy().client
    texts = [prompt] if isinstance(prompt, str) else prompt
    request = CompletionRequest(prompt=prompt)
    params = SamplingParams(max_tokens=50, ignore_eos=True)

    async def leave_after(count: int) -> None:
        generations = await client.submit(
            [Submission(ids_of(text), params) for text in texts], streaming=True
        )
        job = CompletionJob(
            request=request,
            prompts=[Prompt(tuple(ids_of(text)), text) for text in texts],
            answer_id="x",
            created=0,
            model="toy",
            tokenizer=client.tokenizer,
            n=1,
            scores_only=False,
        )
        stream = stream_completion(job, generations, client.in_thread)
        for _ in range(count):
            await anext(stream)
        await stream.aclose()
        assert [one.aborted for one in generations] == [True] * len(texts)
        assert len(asyncio.all_tasks()) == 1

    for count in (1, 4):
        asyncio.run(leave_after(count))
    client.llm._advance()
    stats = client.llm.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


def test_an_engine_that_dies_in_a_stream_ends_it_with_an_error_event(toy: MakeToy) -> None:
    answer = toy(fail_after=3).post(PATH, {"prompt": "hello", "stream": True, "max_tokens": 9})
    assert answer.status_code == 200
    events = answer.text.split("\n\n")
    assert '"error"' in events[-3]
    assert "the engine is gone" in events[-3]


def test_an_engine_that_dies_before_a_stream_is_a_status(toy: MakeToy) -> None:
    for stream in (False, True):
        answer = toy(fail_after=0).post(PATH, {"prompt": "hello", "stream": stream})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "the engine is gone"

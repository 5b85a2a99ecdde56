"""SamplingParams: what is refused, and what a value means."""

import math

import msgspec
import pytest

from ropeway.compiler.errors import RequestError
from ropeway.runtime.sampling.params import SamplingParams, derive_seed

SAID = [
    ("top_p", 2, "above 0, at most 1"),
    ("top_p", 0, "above 0"),
    ("top_k", -5, "0 or -1 for all tokens"),
    ("min_p", 2, "from 0 to 1"),
]
BAD = [
    ("n", 0),
    ("n", 1025),
    ("n", 1.0),
    ("n", True),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("temperature", None),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -0.5),
    ("min_p", -0.01),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", {5: 101.0}),
    ("logit_bias", [1, 2]),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a", 5]),
    ("stop", 5),
    ("stop", b"x"),
    ("stop", [str(i) for i in range(65)]),
    ("stop", "x" * 4097),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**31]),
    ("stop_token_ids", ["5"]),
    ("stop_token_ids", "5"),
    ("min_tokens", -1),
    ("min_tokens", 17),  # above the default max_tokens of 16
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("logprobs", -2),
    ("prompt_logprobs", 1.5),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 1025),
    ("logprobs", True),
    ("ignore_eos", 1),
    ("detokenize", "no"),
    ("skip_special_tokens", None),
]


@pytest.mark.parametrize(("field", "value", "words"), SAID)
def test_the_refusal_names_what_is_allowed(field: str, value: float, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_value_is_refused_with_its_field(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert "\n" not in str(caught.value)


def test_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.json.decode(b'{"temprature": 0.5}', type=SamplingParams)


def test_stop_needs_text() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop="x", detokenize=False)
    assert caught.value.field == "stop"


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p) == (1, 1.0, 0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.logprobs) == (16, 0, None)
    assert params.skip_special_tokens is True
    assert params.include_stop_str_in_output is False
    assert params.stop_strings == () and params.stop_ids == ()


def test_values_are_normalized() -> None:
    params = SamplingParams(stop=["b", "a", "b"], stop_token_ids=[7, 3, 7], seed=-1)
    assert params.stop_strings == ("b", "a")
    assert params.stop_ids == (7, 3)
    assert params.seed is None
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_logit_bias_is_copied() -> None:
    bias = {5: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[6] = 2.0
    assert params.logit_bias == {5: 1.0}


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"stop_token_ids": [3, 10]}, "stop_token_ids"),
        ({"logit_bias": {10: 1.0}}, "logit_bias"),
        ({"logprobs": 11}, "logprobs"),
        ({"prompt_logprobs": 11}, "prompt_logprobs"),
        ({"min_tokens": 1, "stop_token_ids": list(range(10))}, "min_tokens"),
    ],
)
def test_vocabulary_of_ten(kwargs: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**kwargs).check_vocabulary(10)
    assert caught.value.field == field


def test_vocabulary_edges_pass() -> None:
    SamplingParams(
        stop_token_ids=[9], logit_bias={0: 1.0, 9: -100}, logprobs=-1, prompt_logprobs=10
    ).check_vocabulary(10, eos_ids=(2,))


def test_min_tokens_bans_end_and_stop_ids() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=[7, 2], ignore_eos=True)
    assert set(params.banned_before_min_tokens((2, 3))) == {2, 3, 7}
    assert SamplingParams(stop_token_ids=[7]).banned_before_min_tokens((2,)) == ()


def test_round_trip_between_processes() -> None:
    params = SamplingParams(
        n=3,
        temperature=0.5,
        stop=["a", "b"],
        stop_token_ids=[1],
        logit_bias={3: 1.5},
        seed=2**64 - 1,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params


def test_derived_seeds_differ_and_are_stable() -> None:
    seeds = {derive_seed(engine, turn) for engine in range(4) for turn in range(50)}
    assert len(seeds) == 200
    assert all(0 <= s < 2**64 for s in seeds)
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert derive_seed(0, 0) == derive_seed(0, 0)

"""Requests that can't be served: refused by field before they are queued, neighbours untouched."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_checkpoint import VOCAB, byte_prompt

import ropeway
from ropeway.compiler.errors import InputError, RequestError

GREEDY = ropeway.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
MODEL_LENGTH = 128
Greedy = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="module")
def llm(artifact: Path) -> Iterator[ropeway.LLM]:
    with ropeway.LLM(artifact, num_threads=1) as llm:
        yield llm


def params(**fields: Any) -> Any:
    return ropeway.SamplingParams(temperature=0, **{"max_tokens": 3, **fields})


BAD_REQUESTS: dict[str, tuple[str, Callable[[], tuple[Any, Any, dict[str, Any]]]]] = {
    "an id past the vocabulary": ("prompt", lambda: ([VOCAB], GREEDY, {})),
    "a negative id": ("prompt", lambda: ([-1], GREEDY, {})),
    "a huge id": ("prompt", lambda: ([2**64], GREEDY, {})),
    "a fraction": ("prompt", lambda: ([1.0], GREEDY, {})),
    "no ids": ("prompt", lambda: ([], GREEDY, {})),
    "no text": ("prompt", lambda: ("", GREEDY, {})),
    "a lone surrogate": ("prompt", lambda: ("a\ud800", GREEDY, {})),
    "as long as the model": ("prompt", lambda: ([5] * MODEL_LENGTH, GREEDY, {})),
    "longer than the model": ("prompt", lambda: ([5] * (MODEL_LENGTH + 1), GREEDY, {})),
    "a stop id past the vocabulary": (
        "stop_token_ids",
        lambda: ([1], params(stop_token_ids=[VOCAB]), {}),
    ),
    "a negative stop id": ("stop_token_ids", lambda: ([1], params(stop_token_ids=[-1]), {})),
    "a bias past the vocabulary": (
        "logit_bias",
        lambda: ([1], params(logit_bias={VOCAB: 1.0}), {}),
    ),
    "a bias that isn't a number": (
        "logit_bias",
        lambda: ([1], params(logit_bias={1: float("nan")}), {}),
    ),
    "no tokens to make": ("max_tokens", lambda: ([1], params(max_tokens=0), {})),
    "a fraction of a token": ("max_tokens", lambda: ([1], params(max_tokens=1.5), {})),
    "more logprobs than tokens": ("logprobs", lambda: ([1], params(logprobs=VOCAB + 1), {})),
    "an empty stop string": ("stop", lambda: ([1], params(stop=""), {})),
    "parameters of another kind": ("sampling_params", lambda: ([1], {"n": 1}, {})),
    "a priority of text": ("priority", lambda: ([1], GREEDY, {"priority": "high"})),
    "a salt that isn't text": ("cache_salt", lambda: ([1], GREEDY, {"cache_salt": 5})),
}


@pytest.mark.parametrize(("field", "request_of"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_refused_by_field_while_neighbours_run(
    llm: ropeway.LLM, greedy: Greedy, field: str, request_of: Callable[[], Any]
) -> None:
    ids = byte_prompt(9)
    neighbour = llm.stream(ids, GREEDY)
    first = next(neighbour)
    for alone in (True, False):
        with pytest.raises(RequestError) as caught:
            prompt, given, options = request_of()
            if alone:
                llm.stream(prompt, given, **options)
            else:  # behind a good one, which mustn't be queued either
                llm.generate([ids, prompt], [GREEDY, given], **options)
        assert caught.value.field == field
        assert "\n" not in str(caught.value)
    assert llm.stats().running + llm.stats().waiting == 1
    found = [*first.token_ids, *(token for delta in neighbour for token in delta.token_ids)]
    assert found == greedy(ids, 6)
    assert llm.stats().blocks_used == 0


def test_unknown_fields_are_refused() -> None:
    for field in ("best_of", "guided_json", "max_token"):
        with pytest.raises(TypeError, match=field):
            ropeway.SamplingParams(**{field: 1})


@pytest.mark.parametrize("max_tokens", [1, 2, None, 10**9, 2**70])
@pytest.mark.parametrize("length", [1, MODEL_LENGTH - 2, MODEL_LENGTH - 1])
def test_lengths_up_to_the_last_position(
    llm: ropeway.LLM, greedy: Greedy, length: int, max_tokens: int | None
) -> None:
    """A prompt of the model's length but one has room for one token, at the table's last row."""
    ids = byte_prompt(length)
    room = MODEL_LENGTH - length
    want = room if max_tokens is None else min(room, max_tokens)
    given = ropeway.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    choice = llm.generate(ids, given)[0].outputs[0]
    assert choice.token_ids == greedy(ids, want)
    assert choice.finish_reason == "length"


def test_ids_of_an_array_are_ids(llm: ropeway.LLM) -> None:
    ids = byte_prompt(9)
    [output] = llm.generate([list(np.array(ids, np.int64))], GREEDY)
    assert output.prompt_token_ids == ids
    assert {type(token) for token in output.prompt_token_ids} == {int}


def test_a_seed_in_another_batch_position_after_a_hit_and_with_choices(llm: ropeway.LLM) -> None:
    seeded = ropeway.SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=8, logprobs=1)
    ids = byte_prompt(40)
    [alone] = llm.generate(ids, seeded)
    batch = llm.generate([*(byte_prompt(5 + n, 1) for n in range(6)), ids], seeded)
    assert batch[-1].num_cached_tokens > 0
    assert alone.outputs == batch[-1].outputs == llm.generate(ids, seeded)[0].outputs
    assert len({tuple(choice.token_ids) for choice in alone.outputs}) == 3


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_threads": "2"}, "num_threads"),
        ({"num_threads": True}, "num_threads"),
        ({"max_num_seqs": 1.5}, "max_num_seqs"),
        ({"max_prefill_chunk": "x"}, "max_prefill_chunk"),
        ({"max_num_batched_tokens": None, "max_num_seqs": None}, "max_num_seqs"),
        ({"kv_cache_memory": "1G"}, "kv_cache_memory"),
        ({"kv_cache_memory": 1 << 60}, "kv_cache_memory.*available"),
        ({"seed": None}, "seed"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching"),
    ],
)
def test_options_of_another_kind(artifact: Path, options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        ropeway.LLM(artifact, **options)


@pytest.mark.parametrize("program", [None, 5, b"m.rope"])
def test_programs_of_another_kind(program: Any) -> None:
    with pytest.raises(InputError, match=r"program: .* is neither"):
        ropeway.LLM(program)

"""Tokens and logprobs are bit-equal however a request is served: a tiny bf16 decoder on cpu."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.cpu_programs import FAST, compile_decoder

from ropeway.runtime.llm import LLM
from ropeway.runtime.outputs import CompletionOutput
from ropeway.runtime.sampling.params import SamplingParams

SHAPE = replace(FAST, dtype="bf16")
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, logprobs=3),
    "seeded": SamplingParams(
        temperature=0.9, top_p=0.95, min_p=0.01, seed=9, max_tokens=40, logprobs=3, n=3
    ),
    "penalties": SamplingParams(
        temperature=0.7,
        seed=4,
        max_tokens=40,
        logprobs=1,
        n=2,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        min_tokens=5,
    ),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("artifact") / "tiny.rope"
    compile_decoder(SHAPE).write(place)
    return place


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, SHAPE.vocab, length).tolist()


PROMPT = prompt(96)


@pytest.fixture(scope="module", params=list(PARAMS))
def params(request: pytest.FixtureRequest) -> SamplingParams:
    return PARAMS[request.param]


@pytest.fixture(scope="module")
def alone(path: Path, params: SamplingParams) -> list[CompletionOutput]:
    with LLM(path, enable_prefix_caching=False, num_threads=1) as llm:
        return llm.generate(PROMPT, params)[0].outputs


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("others", [0, 5])
def test_chunks_and_company(
    path: Path, params: SamplingParams, alone: list[CompletionOutput], chunk: int, others: int
) -> None:
    prompts = [prompt(3 + 19 * i, i + 1) for i in range(others)]
    with LLM(path, max_prefill_chunk=chunk, num_threads=2) as llm:
        assert llm.generate([*prompts, PROMPT], params)[-1].outputs == alone


def test_a_prefix_hit(path: Path, params: SamplingParams, alone: list[CompletionOutput]) -> None:
    with LLM(path) as llm:
        for cached in (0, 95, 95):
            [output] = llm.generate(PROMPT, params)
            assert output.num_cached_tokens == cached
            assert output.outputs == alone
        llm.generate([*PROMPT[:70], 1, 2, 3], params)
        assert llm.generate(PROMPT, params)[0].outputs == alone


@pytest.mark.parametrize("caching", [True, False])
def test_two_preemptions_of_every_choice(
    path: Path, params: SamplingParams, alone: list[CompletionOutput], caching: bool
) -> None:
    with LLM(path, max_num_seqs=3, enable_prefix_caching=caching) as llm:
        stream = llm.stream(PROMPT, params, priority=1)
        deltas = []
        for pause in (4, 9):
            deltas += [next(stream) for _ in range(pause * params.n)]
            short = SamplingParams(temperature=0, max_tokens=2)
            llm.generate([prompt(20, 70 + k) for k in range(3)], short)
        deltas += list(stream)
        assert llm.stats().preemptions >= 2 * params.n
    for choice in alone:
        mine = [d for d in deltas if d.index == choice.index]
        assert [t for d in mine for t in d.token_ids] == choice.token_ids
        assert [e for d in mine for e in d.logprobs or []] == choice.logprobs


def test_cache_groups_of_full_and_windowed_layers(tmp_path: Path) -> None:
    decoder = compile_decoder(replace(FAST, windows=(0, 24)))
    decoder.write(tmp_path / "windows.rope")
    params = SamplingParams(temperature=0, max_tokens=20)
    prompts = [prompt(n) for n in (5, 40, 90)]
    with LLM(tmp_path / "windows.rope", max_prefill_chunk=16) as llm:
        assert llm._engine.device.cache_layout.groups == 2
        for _ in range(2):  # the second time after a prefix hit
            for ids, output in zip(prompts, llm.generate(prompts, params), strict=True):
                found = output.outputs[0].token_ids
                rows = decoder.oracle([*ids, *found])
                assert found == rows[len(ids) - 1 : -1].argmax(axis=1).tolist()

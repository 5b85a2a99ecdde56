"""The numerics contract: a request's tokens and logprobs are bit-equal however it is served.

Real model, bf16, the CPU target; greedy and seeded sampling. Every way of serving is compared
with the request alone. The oracle is equality itself, across schedules that share no state.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import ropeway
from ropeway.compiler.artifact.reader import open_artifact
from ropeway.compiler.config import Bucket
from ropeway.runtime.engine.limits import StepLimits
from ropeway.runtime.engine.scheduler import Scheduler
from ropeway.runtime.loader import tokenizer_assets
from ropeway.runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

NEW_TOKENS = 24
PASSAGE = Path(__file__).parents[1] / "parity" / "passage.txt"


@cache
def prompt(path: Path) -> list[int]:
    """The first 150 tokens of the passage."""
    assets = tokenizer_assets(open_artifact(path))
    assert assets is not None
    return list(Tokenizer.from_assets(assets).encode(PASSAGE.read_text()))[:150]


def neighbours(count: int) -> list[list[int]]:
    """Mixed prompts of 1 to 187 tokens, none a prefix of the prompt."""
    return [
        [(104729 * i + 6101 * n * n) % 40000 + 300 for i in range(1 + 6 * n)] for n in range(count)
    ]


GREEDY = ropeway.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=3)
SEEDED = ropeway.SamplingParams(
    temperature=0.9,
    top_p=0.95,
    seed=1234,
    max_tokens=NEW_TOKENS,
    ignore_eos=True,
    logprobs=3,
    repetition_penalty=1.1,
)


@dataclass(frozen=True)
class Answer:
    """What has to be bit-equal."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float, int], ...], ...]


def _answer(output: Any) -> Answer:
    choice = output.outputs[0]
    return Answer(
        tuple(choice.token_ids),
        tuple(
            tuple((token, lp.logprob, lp.rank) for token, lp in entry.items())
            for entry in choice.logprobs
        ),
    )


def _serve(path: Path, params: Any, others: int = 0, **options: Any) -> Answer:
    with ropeway.LLM(path, **options) as llm:
        prompts = [*neighbours(others), prompt(path)]
        return _answer(llm.generate(prompts, params)[-1])


@pytest.fixture(scope="module", params=[GREEDY, SEEDED], ids=["greedy", "seeded"])
def params(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def alone(smollm2_bf16: Path, params: Any) -> Iterator[Answer]:
    """The request alone, without a prefix cache: what every other way must equal."""
    answer = _serve(smollm2_bf16, params, enable_prefix_caching=False)
    assert len(set(answer.tokens)) > 4
    yield answer


def test_in_a_batch_of_32(smollm2_bf16: Path, params: Any, alone: Answer) -> None:
    assert _serve(smollm2_bf16, params, others=31) == alone


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_any_chunk_size(smollm2_bf16: Path, params: Any, alone: Answer, chunk: int | None) -> None:
    assert _serve(smollm2_bf16, params, others=3, max_prefill_chunk=chunk) == alone


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(
    smollm2_bf16: Path, params: Any, alone: Answer, threads: int
) -> None:
    assert _serve(smollm2_bf16, params, num_threads=threads) == alone


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk", [40, None])
def test_with_the_next_step_in_flight(
    smollm2_bf16: Path, params: Any, alone: Answer, threads: int, chunk: int | None
) -> None:
    options = {"overlap": True, "num_threads": threads, "max_prefill_chunk": chunk}
    assert _serve(smollm2_bf16, params, others=5, **options) == alone


@pytest.mark.parametrize("length", [150, 128, 127, 96])
def test_after_a_prefix_hit(smollm2_bf16: Path, params: Any, alone: Answer, length: int) -> None:
    with ropeway.LLM(smollm2_bf16) as llm:
        first = llm.generate([prompt(smollm2_bf16)[:length]], params)[0]
        again = llm.generate([prompt(smollm2_bf16)], params)[0]
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens >= length // 32 * 32 - 32
    assert again.num_cached_tokens > 0
    assert _answer(again) == alone


def test_after_two_preemptions(
    smollm2_bf16: Path, params: Any, alone: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted: list[list[int]] = []
    original = Scheduler._preempt

    def counting(self: Scheduler, seq: Any) -> None:
        preempted.append(list(seq.request.prompt))
        original(self, seq)

    monkeypatch.setattr(Scheduler, "_preempt", counting)
    with ropeway.LLM(smollm2_bf16, kv_cache_memory=_blocks(smollm2_bf16, 8)) as llm:
        stream = llm.stream(prompt(smollm2_bf16), params, priority=5)
        pieces = [next(stream)]
        for number in range(2):  # each urgent neighbour takes the blocks that the prompt holds
            llm.generate([neighbours(31)[30 - number]], params, priority=0)
            pieces.append(next(stream))
        pieces += list(stream)
    assert preempted.count(prompt(smollm2_bf16)) >= 2
    tokens = tuple(token for piece in pieces for token in piece.token_ids)
    logprobs = tuple(
        tuple((token, lp.logprob, lp.rank) for token, lp in entry.items())
        for piece in pieces
        for entry in piece.logprobs or []
    )
    assert Answer(tokens, logprobs) == alone


def _blocks(path: Path, count: int) -> int:
    """Bytes of `count` KV blocks and the null block."""
    manifest = ropeway.load(path).artifact.manifest
    return (count + 1) * sum(group.bytes_per_block for group in manifest.cache_groups)


def test_in_the_next_larger_bucket(
    smollm2_bf16: Path, params: Any, alone: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[Bucket] = set()
    choose: Callable[..., Bucket] = StepLimits.choose

    def next_larger(self: StepLimits, tokens: int, requests: int, rows: int) -> Bucket:
        exact = choose(self, tokens, requests, rows)
        larger = [b for b in self.buckets if b.kind == exact.kind and b.tokens > exact.tokens]
        used.add(larger[0] if larger else exact)
        return larger[0] if larger else exact

    monkeypatch.setattr(StepLimits, "choose", next_larger)
    assert _serve(smollm2_bf16, params) == alone
    assert Bucket("decode", 2, 2, 2) in used


def test_seed_and_choices_do_not_depend_on_the_company(smollm2_bf16: Path) -> None:
    params = ropeway.SamplingParams(
        temperature=1.0, seed=7, n=3, max_tokens=12, ignore_eos=True, logprobs=1
    )
    with ropeway.LLM(smollm2_bf16) as llm:
        single = llm.generate([prompt(smollm2_bf16)], params)[0]
        batch = llm.generate([*neighbours(6), prompt(smollm2_bf16)], params)[-1]
    choices = [tuple(choice.token_ids) for choice in single.outputs]
    assert len(set(choices)) == 3
    assert [tuple(choice.token_ids) for choice in batch.outputs] == choices


def _mixed(path: Path) -> tuple[list[list[int]], list[Any]]:
    """Requests that share prefixes, stop by id or text in mid-flight, are penalized or forked."""
    stem = prompt(path)
    prompts = [stem, stem[:64], [*stem[:96], 500], *neighbours(9)[1:], stem[:97], stem]
    common = {"max_tokens": 20, "logprobs": 1}
    stops = list(range(0, 49152, 5))
    kinds = [
        ropeway.SamplingParams(temperature=0, **common),
        ropeway.SamplingParams(temperature=1.0, seed=5, stop_token_ids=stops, **common),
        ropeway.SamplingParams(temperature=0.9, seed=6, n=3, **common),
        ropeway.SamplingParams(temperature=0, stop=[" the", ",", "."], min_tokens=3, **common),
        ropeway.SamplingParams(
            temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, **common
        ),
    ]
    return prompts, [kinds[n % len(kinds)] for n in range(len(prompts))]


def _serve_mixed(path: Path, **options: Any) -> tuple[list[Any], int]:
    """The outputs, the first of them beside a stream that is closed after some deltas; how often
    a sequence was preempted."""
    prompts, params = _mixed(path)
    with ropeway.LLM(path, seed=3, **options) as llm:
        doomed = llm.stream(neighbours(12)[11], GREEDY)
        queued = [llm.stream(p, one) for p, one in zip(prompts[:4], params[:4], strict=True)]
        for _ in range(3):
            next(doomed)
        doomed.close()
        first = [[(d.index, d.token_ids, d.logprobs) for d in stream] for stream in queued]
        outputs = llm.generate(prompts, params)
        stats = llm.stats()
    assert stats.blocks_used == 0
    found = [
        *(sorted(deltas, key=lambda d: d[0]) for deltas in first),
        *(o.outputs for o in outputs),
    ]
    return found, stats.preemptions


def test_overlap_changes_no_bit_of_mixed_requests(smollm2_bf16: Path) -> None:
    expected, _ = _serve_mixed(smollm2_bf16, overlap=False)
    reasons = [choice.finish_reason for choices in expected[4:] for choice in choices]
    assert reasons.count("stop") > 3 and reasons.count("length") > 3
    for blocks in (8, 200):
        memory = _blocks(smollm2_bf16, blocks)
        found, preemptions = _serve_mixed(smollm2_bf16, overlap=True, kv_cache_memory=memory)
        assert found == expected
        assert (preemptions > 0) == (blocks == 8)

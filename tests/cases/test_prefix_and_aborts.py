"""Prefix cache, chunks, preemption and aborts on the cpu target, against transformers.

Blocks hold 32 tokens. Whatever is cancelled, evicted or shared, every other request says what it
says alone, and the pool returns to where it was.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny_checkpoint import byte_prompt

import ropeway

BLOCK = 32
Greedy = Callable[[list[int], int], list[int]]


def params(count: int = 8, **fields: Any) -> ropeway.SamplingParams:
    return ropeway.SamplingParams(
        **{"temperature": 0, "max_tokens": count, "ignore_eos": True, **fields}
    )


def tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def blocks(artifact: Path, count: int) -> int:
    """Bytes for `count` KV blocks beside the null block."""
    opened = ropeway.load(artifact).artifact
    assert opened is not None
    return (count + 1) * sum(group.bytes_per_block for group in opened.manifest.cache_groups)


# --- prefix cache ---


@pytest.mark.parametrize("length", [k * BLOCK + d for k in (1, 2, 3) for d in (-1, 0, 1)])
def test_ten_times_the_same(artifact: Path, greedy: Greedy, length: int) -> None:
    """Run 1, nine hits and the cache switched off agree; the hits are counted to the token."""
    ids = byte_prompt(length)
    with ropeway.LLM(artifact, enable_prefix_caching=False) as llm:
        off = llm.generate(ids, params(logprobs=1))[0]
        assert llm.stats().prefix_hits == 0
    with ropeway.LLM(artifact) as llm:
        runs = [llm.generate(ids, params(logprobs=1))[0] for _ in range(10)]
        stats = llm.stats()
    assert tokens(off) == greedy(ids, 8)
    assert all(run.outputs == off.outputs for run in runs)
    # Whole blocks, but the last token is always computed.
    hit = length // BLOCK * BLOCK - (length % BLOCK == 0)
    assert [run.num_cached_tokens for run in runs] == [0] + [hit] * 9
    assert (stats.prefix_hits, stats.prefix_queries) == (9 * hit, 10 * length)


def test_ten_at_once(artifact: Path, greedy: Greedy) -> None:
    ids = byte_prompt(70)
    with ropeway.LLM(artifact, max_prefill_chunk=9) as llm:
        outputs = llm.generate([ids] * 10, params())
    assert all(tokens(output) == greedy(ids, 8) for output in outputs)


def test_equal_prompts_of_two_tenants_share_nothing(artifact: Path) -> None:
    ids = byte_prompt(100)
    with ropeway.LLM(artifact) as llm:
        cached = [
            llm.generate(ids, params(), cache_salt=salt)[0].num_cached_tokens
            for salt in ("a", "b", "", "a", "b", "")
        ]
    assert cached == [0, 0, 0, 96, 96, 96]


# --- chunks ---


@pytest.mark.parametrize("chunk", [1, 2, 7, 16])
@pytest.mark.parametrize("k", [1, 2])
def test_a_last_chunk_of_one_token_is_no_decode(
    artifact: Path, greedy: Greedy, chunk: int, k: int
) -> None:
    """Two prompts of k * chunk + 1 at once, beside one that is generating."""
    prompts = [byte_prompt(k * chunk + 1, seed) for seed in (1, 2)]
    beside = byte_prompt(3, 3)
    with ropeway.LLM(artifact, max_prefill_chunk=chunk, enable_prefix_caching=False) as llm:
        stream = llm.stream(beside, params(20))
        got = list(next(stream).token_ids)
        outputs = llm.generate(prompts, params())
        got += [token for delta in stream for token in delta.token_ids]
    assert [tokens(output) for output in outputs] == [greedy(ids, 8) for ids in prompts]
    assert got == greedy(beside, 20)


# --- preemption ---


@pytest.mark.parametrize(
    "sampling",
    [
        params(30, logprobs=2),
        params(
            30,
            logprobs=2,
            temperature=0.9,
            seed=5,
            repetition_penalty=1.2,
            presence_penalty=0.4,
            frequency_penalty=0.3,
        ),
    ],
    ids=["greedy", "penalties"],
)
def test_a_pool_so_small_that_all_are_preempted(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, sampling: ropeway.SamplingParams
) -> None:
    """Text, tokens, logprobs and counts stay as they were with room for all."""
    from ropeway.runtime.engine.scheduler import Scheduler  # noqa: PLC0415

    evicted: dict[str, int] = {}
    preempt = Scheduler._preempt

    def counting(self: Scheduler, seq: Any) -> None:
        evicted[seq.request.request_id] = evicted.get(seq.request.request_id, 0) + 1
        preempt(self, seq)

    monkeypatch.setattr(Scheduler, "_preempt", counting)
    prompts = [byte_prompt(25 + 2 * seed, seed) for seed in range(4)]
    with ropeway.LLM(artifact) as llm:
        calm = llm.generate(prompts, sampling)
    assert not evicted
    with ropeway.LLM(artifact, kv_cache_memory=blocks(artifact, 4)) as llm:
        streams = [llm.stream(ids, sampling, priority=1) for ids in prompts]
        deltas: list[list[Any]] = [[next(stream)] for stream in streams]
        guests = 4
        for turn in range(guests):
            # Each urgent guest needs all four blocks: everybody has to go.
            llm.generate(byte_prompt(120, 9 + turn), params(100), priority=0)
            for own, stream in zip(deltas, streams, strict=True):
                own.append(next(stream))
        for own, stream in zip(deltas, streams, strict=True):
            own.extend(stream)
        stats = llm.stats()
    ids = [stream.request_id for stream in streams]
    assert all(evicted.get(request_id, 0) >= 2 for request_id in ids), evicted
    for own, output in zip(deltas, calm, strict=True):
        choice = output.outputs[0]
        assert "".join(delta.text for delta in own) == choice.text
        assert [token for delta in own for token in delta.token_ids] == choice.token_ids
        assert [entry for delta in own for entry in delta.logprobs] == choice.logprobs
        assert own[-1].finish_reason == choice.finish_reason == "length"
    assert stats.prompt_tokens == sum(map(len, prompts)) + guests * 120
    assert stats.output_tokens == 4 * 30 + guests * 8
    assert stats.blocks_used == 0


# --- aborts ---


def before_scheduled(llm: ropeway.LLM) -> list[Any]:
    return [llm.stream(byte_prompt(70, 5), params(20))]


def in_prefill(llm: ropeway.LLM) -> list[Any]:
    """Some of its chunks are computed and its first blocks published."""
    stream = llm.stream(byte_prompt(120, 5), params(5))
    used = llm.stats().blocks_used
    while llm.stats().blocks_used < used + 3:
        llm._advance()
    return [stream]


def decoding(llm: ropeway.LLM) -> list[Any]:
    stream = llm.stream(byte_prompt(70, 5), params(20))
    for _ in range(3):
        next(stream)
    return [stream]


def several_choices(llm: ropeway.LLM) -> list[Any]:
    stream = llm.stream(byte_prompt(70, 5), params(20, n=3, temperature=1, seed=1))
    for _ in range(7):
        next(stream)
    return [stream]


def preempted(llm: ropeway.LLM) -> list[Any]:
    stream = llm.stream(byte_prompt(70, 5), params(20), priority=3)
    next(stream)
    count = llm.stats().preemptions
    llm.generate([byte_prompt(60, n) for n in (6, 7)], params(2), priority=-1)
    assert llm.stats().preemptions > count
    return [stream]


def queued(llm: ropeway.LLM) -> list[Any]:
    """Behind one that takes the last place."""
    other = llm.stream(byte_prompt(20, 8), params(60))
    stream = llm.stream(byte_prompt(70, 5), params(20), priority=9)
    llm._advance()
    assert llm.stats().waiting == 1
    return [other, stream]


STATES = [before_scheduled, queued, in_prefill, decoding, several_choices, preempted]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
@pytest.mark.parametrize("how", ["abort", "close"])
def test_an_abort_gives_its_blocks_back(
    artifact: Path, greedy: Greedy, state: Callable[[ropeway.LLM], list[Any]], how: str
) -> None:
    ids = byte_prompt(40, 4)
    seats = 2 if state in (queued, preempted) else 8
    memory = blocks(artifact, 12)
    with ropeway.LLM(
        artifact, max_num_seqs=seats, kv_cache_memory=memory, max_prefill_chunk=16
    ) as llm:
        baseline = llm.stats().blocks_free
        bystander = llm.stream(ids, params(40))
        got = list(next(bystander).token_ids)
        *others, stream = state(llm)  # a stream that is dropped is aborted
        if how == "abort":
            assert llm.abort(stream.request_id)
            assert {delta.finish_reason for delta in stream} <= {"abort", None}
        else:
            stream.close()
        again = llm.generate(byte_prompt(120, 5), params(4), priority=-1)[0]
        assert tokens(again) == greedy(byte_prompt(120, 5), 4)
        got += [token for delta in bystander for token in delta.token_ids]
        assert got == greedy(ids, 40)
        llm.abort()
        llm._advance()
        assert all(list(other)[-1].finish_reason for other in others)
        stats = llm.stats()
    assert (stats.blocks_used, stats.running, stats.waiting) == (0, 0, 0)
    assert stats.blocks_free == baseline


@pytest.mark.parametrize("milliseconds", [0, 5, 15, 19])
def test_cancel_and_retry_on_a_shared_prefix_leaves_the_canaries_alone(
    artifact: Path, greedy: Greedy, milliseconds: int
) -> None:
    """Threads that start, cancel after some time and start again, beside four canaries."""
    stem = byte_prompt(70, 1)
    canaries = [[*stem, 200 + n, n] for n in range(4)]
    stop = threading.Event()
    retried = []

    def cancel_and_retry(number: int) -> None:
        while not stop.is_set():
            stream = llm.stream([*stem, 100 + number], params(40))
            next(stream)
            time.sleep(milliseconds / 1000)
            stream.close()
            retried.append(number)

    memory = blocks(artifact, 20)
    with ropeway.LLM(artifact, kv_cache_memory=memory, max_prefill_chunk=16) as llm:
        threads = [threading.Thread(target=cancel_and_retry, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        rounds = [llm.generate(canaries, params(30)) for _ in range(3)]
        stop.set()
        for thread in threads:
            thread.join(30)
        stats = llm.stats()
    assert retried
    for outputs in rounds:
        assert [tokens(output) for output in outputs] == [greedy(ids, 30) for ids in canaries]
    assert (stats.blocks_used, stats.running, stats.waiting) == (0, 0, 0)

"""The numerics contract of sampling: a row's bits depend on the row alone."""

import ctypes
import threading

import numpy as np
import pytest

from ropeway.runtime.sampling.batch import (
    RowSettings,
    SampleBatch,
    SampleResult,
    SlotReset,
    WantedRow,
)
from ropeway.runtime.sampling.params import SamplingParams

VOCAB = 3001
MIXED = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 0},
    {},
    {"logprobs": 4},
    {"top_k": 40},
    {"top_p": 0.9, "logprobs": 1},
    {"temperature": 1.5, "min_p": 0.02},
    {"temperature": 0.7, "top_k": 100, "top_p": 0.95, "logprobs": 20},
    {"repetition_penalty": 1.2},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5, "top_p": 0.8},
    {"logit_bias": {5: 3.0, 7: -100.0}},
    {"min_tokens": 3, "stop_token_ids": [9]},
    {"prompt_logprobs": 3},
]


def rows_of(count: int) -> tuple[list[WantedRow], list[SlotReset]]:
    rows, resets = [], []
    for i in range(count):
        kwargs = MIXED[i % len(MIXED)]
        settings = RowSettings.of(
            SamplingParams(**kwargs), vocab_size=VOCAB, seed=i // 3, choice=i % 3, eos_ids=(1,)
        )
        target = 17 if "prompt_logprobs" in kwargs else -1
        rows.append(WantedRow(settings, row=i, position=i + 5, slot=i, target=target))
        if settings.needs_slot:
            resets.append(SlotReset(i, [i, i + 1, i + 1], [2, 2, i]))
    return rows, resets


def bits(result: SampleResult, index: int) -> tuple[bytes, ...]:
    parts = (result.tokens, result.logprobs, result.ranks)
    return tuple(p[index].tobytes() for p in parts) + tuple(p.tobytes() for p in result.top(index))


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(3).normal(0, 3, (39, VOCAB)).astype(np.float32)


@pytest.fixture
def expected(make_native, logits) -> list[tuple[bytes, ...]]:
    rows, resets = rows_of(39)
    result = make_native(VOCAB).sample(logits, SampleBatch.build(rows, resets))
    assert not result.faults
    return [bits(result, i) for i in range(39)]


def test_alone(make_native, logits, expected) -> None:
    rows, resets = rows_of(39)
    sampler = make_native(VOCAB)
    sampler.sample(logits, SampleBatch.build([], resets))
    for i, row in enumerate(rows):
        assert bits(sampler.sample(logits, SampleBatch.build([row])), 0) == expected[i]


def test_in_another_order(make_native, logits, expected) -> None:
    rows, resets = rows_of(39)
    order = np.random.default_rng(1).permutation(39)
    batch = SampleBatch.build([rows[i] for i in order], resets)
    result = make_native(VOCAB).sample(logits, batch)
    assert [bits(result, k) for k in range(39)] == [expected[i] for i in order]


def test_in_strided_logits(make_native, logits, expected) -> None:
    rows, resets = rows_of(39)
    wide = np.full((39, VOCAB + 13), np.nan, np.float32)
    wide[:, :VOCAB] = logits
    result = make_native(VOCAB).sample(wide[:, :VOCAB], SampleBatch.build(rows, resets))
    assert [bits(result, i) for i in range(39)] == expected


@pytest.mark.parametrize("isa", [0, 1, 2])
def test_on_every_instruction_set(make_native, logits, expected, isa: int) -> None:
    rows, resets = rows_of(39)
    result = make_native(VOCAB, isa).sample(logits, SampleBatch.build(rows, resets))
    assert [bits(result, i) for i in range(39)] == expected


@pytest.mark.parametrize("size", [2, 3, 50])
def test_over_a_team(make_native, library: ctypes.CDLL, logits, expected, size: int) -> None:
    def run(address: int) -> None:
        team = [
            threading.Thread(target=library.ropeway_sample_rows, args=(address, rank, size))
            for rank in range(size)
        ]
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()

    rows, resets = rows_of(39)
    result = make_native(VOCAB).sample(logits, SampleBatch.build(rows, resets), run)
    assert [bits(result, i) for i in range(39)] == expected

"""Rows with a mask: only what its bits allow is drawn, and nothing else of the row changes."""

import numpy as np
import pytest
from support import sampling_oracle as oracle

from ropeway.compiler.errors import RequestError, RunError
from ropeway.runtime.sampling.batch import (
    RowSettings,
    SampleBatch,
    SlotReset,
    WantedRow,
    mask_bits,
    mask_words,
)
from ropeway.runtime.sampling.params import SamplingParams

EOS = 3
PARAMS = [
    {"temperature": 0},
    {},
    {"temperature": 2.5},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.1},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.02},
    {"logit_bias": {0: 100.0, 1: -100.0}},
    {"temperature": 0, "logit_bias": {2: 100.0}},
]


def mask_for(vocab: int, ids) -> np.ndarray:
    """Written bit by bit, in Python's own numbers."""
    words = [0] * mask_words(vocab)
    for token in ids:
        words[token // 32] |= 1 << (token % 32)
    return np.array(words, np.uint32).view(np.int32)


def logits_of(vocab: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((1, vocab)) * 3
    return (np.round(values * 8) / 8).astype(np.float32)


def row(params: SamplingParams, vocab: int, *, seed: int = 0, **fields) -> WantedRow:
    settings = RowSettings.of(params, vocab_size=vocab, seed=seed, eos_ids=(EOS,), request="r")
    return WantedRow(settings, **{"row": 0, "position": 0, **fields})


def some_ids(vocab: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return sorted(rng.permutation(vocab)[: rng.integers(1, max(2, vocab // 3))].tolist())


@pytest.mark.parametrize("vocab", [5, 31, 32, 33, 64, 97, 1500])
def test_bits_and_words_agree(vocab: int) -> None:
    ids = some_ids(vocab, vocab)
    assert mask_words(vocab) == (vocab + 31) // 32
    assert np.flatnonzero(mask_bits(mask_for(vocab, ids), vocab)).tolist() == ids
    settings = RowSettings.of(SamplingParams(allowed_token_ids=ids), vocab_size=vocab, seed=0)
    assert settings.allowed.tolist() == mask_for(vocab, ids).tolist()


@pytest.mark.parametrize("kwargs", PARAMS)
@pytest.mark.parametrize("vocab", [5, 33, 97, 1500])
def test_a_masked_row_draws_as_if_the_others_were_minus_infinity(
    make_sampler, kwargs: dict, vocab: int
) -> None:
    logits = logits_of(vocab)
    ids = some_ids(vocab, vocab + 1)
    cut = np.full_like(logits, -np.inf)
    cut[:, ids] = logits[:, ids]
    sampler = make_sampler(vocab)
    params = SamplingParams(**kwargs)
    mask = mask_for(vocab, ids)
    masked = [row(params, vocab, seed=seed, mask=mask) for seed in range(40)]
    plain = [row(params, vocab, seed=seed) for seed in range(40)]
    got = sampler.sample(logits, SampleBatch.build(masked))
    want = sampler.sample(cut, SampleBatch.build(plain))
    got.check()
    assert got.tokens.tolist() == want.tokens.tolist()
    assert set(got.tokens.tolist()) <= set(ids)


def test_draws_follow_the_masked_distribution(make_native) -> None:
    vocab, draws = 40, 20000
    logits = logits_of(vocab, 4)
    ids = some_ids(vocab, 9)
    cut = [x if i in ids else -np.inf for i, x in enumerate(logits[0].tolist())]
    exact = oracle.final_probabilities(cut, oracle.Row(temperature=1.3))
    params = SamplingParams(temperature=1.3)
    mask = mask_for(vocab, ids)
    rows = [row(params, vocab, seed=seed, mask=mask) for seed in range(draws)]
    counts = np.bincount(make_native(vocab).sample(logits, SampleBatch.build(rows)).tokens)
    likely = [i for i, p in enumerate(exact) if p * draws >= 5]
    chi = sum((counts[i] - exact[i] * draws) ** 2 / (exact[i] * draws) for i in likely)
    assert chi < oracle.chi_square_limit(len(likely) - 1)


@pytest.mark.parametrize("isa", [0, 1, 2])
@pytest.mark.parametrize("vocab", [5, 8, 31, 33, 97, 1500])
def test_every_instruction_set_masks_alike(make_native, vocab: int, isa: int) -> None:
    logits = logits_of(vocab)
    rows = [
        row(SamplingParams(**kwargs, logprobs=2), vocab, seed=seed, mask=mask_for(vocab, ids))
        for kwargs in PARAMS
        for seed in range(6)
        for ids in [some_ids(vocab, seed)]
    ]
    plain = make_native(vocab, 0).sample(logits, SampleBatch.build(rows))
    other = make_native(vocab, isa).sample(logits, SampleBatch.build(rows))
    plain.check()
    assert other.tokens.tobytes() == plain.tokens.tobytes()
    assert other.logprobs.tobytes() == plain.logprobs.tobytes()


def test_logprobs_stay_those_of_the_raw_distribution(make_sampler) -> None:
    vocab = 97
    logits = logits_of(vocab)
    best = int(logits.argmax())
    ids = [t for t in range(vocab) if t != best]
    params = SamplingParams(temperature=0, logprobs=3)
    result = make_sampler(vocab).sample(
        logits, SampleBatch.build([row(params, vocab, mask=mask_for(vocab, ids))])
    )
    exact = oracle.logprobs(logits[0].tolist())
    assert result.tokens[0] == np.where(np.arange(vocab) == best, -np.inf, logits[0]).argmax()
    assert result.logprobs[0] == pytest.approx(exact[result.tokens[0]], abs=1e-5)
    assert result.ranks[0] == 2
    assert result.top(0)[0][0] == best
    assert result.top(0)[1][0] == pytest.approx(exact[best], abs=1e-5)


def test_neighbours_of_masked_rows_keep_their_bits(make_sampler) -> None:
    vocab = 97
    logits = logits_of(vocab)
    plain = [row(SamplingParams(temperature=t, logprobs=1), vocab, seed=5) for t in (0, 0.7, 2.0)]
    masked = [
        row(SamplingParams(temperature=t), vocab, seed=1, mask=mask_for(vocab, [7, 9]))
        for t in (0, 1)
    ]
    alone = make_sampler(vocab).sample(logits, SampleBatch.build(plain))
    mixed = [masked[0], plain[0], plain[1], masked[1], plain[2]]
    beside = make_sampler(vocab).sample(logits, SampleBatch.build(mixed))
    assert beside.tokens[[1, 2, 4]].tolist() == alone.tokens.tolist()
    assert beside.logprobs[[1, 2, 4]].tobytes() == alone.logprobs.tobytes()
    assert set(beside.tokens[[0, 3]].tolist()) <= {7, 9}


def test_penalties_come_after_the_mask(make_sampler) -> None:
    vocab = 8
    logits = np.array([[5.0, 4.0, 3.5, 0, 0, 0, 0, 0]], np.float32)
    params = SamplingParams(temperature=0, presence_penalty=1.0)
    settings = RowSettings.of(params, vocab_size=vocab, seed=0)
    mask = mask_for(vocab, [1, 2])
    result = make_sampler(vocab).sample(
        logits,
        SampleBatch.build(
            [WantedRow(settings, 0, 0, slot=0, mask=mask)], [SlotReset(0, [0], [1, 0])]
        ),
    )
    assert result.tokens.tolist() == [2]


def test_a_mask_and_allowed_ids_both_hold(make_sampler) -> None:
    vocab = 97
    params = SamplingParams(allowed_token_ids=[4, 50, 96])
    rows = [row(params, vocab, seed=s, mask=mask_for(vocab, [50, 60])) for s in range(20)]
    result = make_sampler(vocab).sample(logits_of(vocab), SampleBatch.build(rows))
    assert set(result.tokens.tolist()) == {50}


def test_an_empty_mask_is_a_fault_of_its_row_only(make_sampler) -> None:
    vocab = 97
    rows = [
        row(SamplingParams(temperature=0), vocab),
        row(SamplingParams(), vocab, mask=mask_for(vocab, [])),
        row(SamplingParams(temperature=0), vocab, mask=mask_for(vocab, [96])),
    ]
    result = make_sampler(vocab).sample(logits_of(vocab), SampleBatch.build(rows))
    assert result.tokens.tolist() == [int(logits_of(vocab).argmax()), -1, 96]
    [fault] = result.faults
    assert fault.index == 1 and "structured_outputs" in fault.message


def test_min_tokens_gives_way_where_only_the_end_is_left(make_sampler) -> None:
    vocab = 33
    params = SamplingParams(min_tokens=5)
    rows = [
        row(params, vocab, mask=mask_for(vocab, [EOS])),
        row(params, vocab, mask=mask_for(vocab, [EOS, 32])),
        row(params, vocab, mask=mask_for(vocab, [EOS]), generated=7),
    ]
    result = make_sampler(vocab).sample(logits_of(vocab), SampleBatch.build(rows))
    assert result.tokens.tolist() == [EOS, 32, EOS]


def test_masked_rows_need_their_logits() -> None:
    vocab = 33
    greedy = SamplingParams(temperature=0)
    allowed = SamplingParams(temperature=0, allowed_token_ids=[4])
    rows = [
        row(greedy, vocab),
        row(greedy, vocab, row=1, mask=mask_for(vocab, [1])),
        row(allowed, vocab, row=2),
    ]
    assert SampleBatch.build(rows).peak_only(3).tolist() == [1, 0, 0]


def test_scored_prompt_rows_have_no_mask(make_sampler) -> None:
    vocab = 33
    params = SamplingParams(prompt_logprobs=0, allowed_token_ids=[4])
    settings = RowSettings.of(params, vocab_size=vocab, seed=0)
    result = make_sampler(vocab).sample(
        logits_of(vocab), SampleBatch.build([WantedRow(settings, 0, 0, target=20)])
    )
    assert result.tokens.tolist() == [20]
    exact = oracle.logprobs(logits_of(vocab)[0].tolist())
    assert result.logprobs[0] == pytest.approx(exact[20], abs=1e-5)


def test_a_mask_that_is_too_short_is_refused(make_sampler) -> None:
    batch = SampleBatch.build([row(SamplingParams(), 97, mask=np.zeros(3, np.int32))])
    with pytest.raises(RunError, match="mask"):
        make_sampler(97).sample(logits_of(97), batch)


@pytest.mark.parametrize("ids", [[97], [0, 500]])
def test_allowed_ids_lie_in_the_vocabulary(ids: list[int]) -> None:
    with pytest.raises(RequestError, match="vocabulary ends at 96"):
        row(SamplingParams(allowed_token_ids=ids), 97)


def test_allowed_ids_that_min_tokens_bans_are_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens"):
        row(SamplingParams(allowed_token_ids=[EOS], min_tokens=1), 97)

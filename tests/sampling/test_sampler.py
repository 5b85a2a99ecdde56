"""Both samplers against exact probabilities, over the whole pipeline."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import sampling_oracle as oracle

from ropeway.compiler.errors import RequestError, RunError
from ropeway.runtime.sampling import native, numpy_sampler
from ropeway.runtime.sampling.batch import ROW, RowSettings, SampleBatch, SlotReset, WantedRow
from ropeway.runtime.sampling.params import SamplingParams

# Salmon et al. 2011, the known-answer vectors of the Random123 distribution (philox4x32, 10 rounds)
PHILOX = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
PARAMS = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 7, "top_p": 0.7},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.5, "min_p": 0.05, "top_p": 0.9},
]


def logits_of(vocab: int, seed: int = 0, rows: int = 1, scale: float = 2.0) -> np.ndarray:
    """Logits on a coarse grid, so that ties are common."""
    values = np.random.default_rng(seed).standard_normal((rows, vocab)) * scale
    return (np.round(values * 8) / 8).astype(np.float32)


def wanted(params: SamplingParams, vocab: int, **kwargs) -> WantedRow:
    keep = {k: kwargs.pop(k) for k in ("seed", "choice", "eos_ids", "request") if k in kwargs}
    rows = RowSettings.of(params, vocab_size=vocab, **{"seed": 0, "request": "r", **keep})
    return WantedRow(rows, **{"row": 0, "position": 0, **kwargs})


def draw(sampler, logits: np.ndarray, params: SamplingParams, seeds: range) -> list[int]:
    rows = [wanted(params, logits.shape[1], seed=s) for s in seeds]
    result = sampler.sample(logits, SampleBatch.build(rows))
    result.check()
    return result.tokens.tolist()


def oracle_row(kwargs: dict) -> oracle.Row:
    return oracle.Row(**kwargs)


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX)
def test_philox_known_answers(library, counter, key, words) -> None:
    native.declare(library)
    assert tuple(native.philox(library, counter, key)) == words
    assert numpy_sampler.philox(counter, key) == words


def test_row_record_has_the_native_layout() -> None:
    assert ROW.itemsize == 120  # a static_assert says the same of the C struct


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 511, 512, 513, 1500])
def test_greedy_takes_the_lowest_id_of_a_tie(make_sampler, vocab: int) -> None:
    sampler = make_sampler(vocab)
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-3, 3, (40, vocab)).astype(np.float32)
    rows = [wanted(SamplingParams(temperature=0), vocab, row=i) for i in range(40)]
    tokens = sampler.sample(logits, SampleBatch.build(rows)).tokens.tolist()
    assert tokens == [oracle.ranking(line.tolist())[0] for line in logits]


def test_negative_zero_ties_with_zero(make_sampler) -> None:
    logits = np.array([[-1.0, -0.0, 0.0, -0.0]], np.float32)
    params = SamplingParams(temperature=0, logprobs=4)
    result = make_sampler(4).sample(logits, SampleBatch.build([wanted(params, 4)]))
    assert result.tokens.tolist() == [1]
    assert result.top(0)[0].tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize("vocab", [1, 3, 8, 37, 513, 2100])
@pytest.mark.parametrize("count", [0, 1, 5, -1])
def test_logprobs_ranks_and_alternatives(make_sampler, vocab: int, count: int) -> None:
    sampler = make_sampler(vocab)
    logits = logits_of(vocab, seed=vocab, rows=4)
    count = min(count, vocab)
    params = SamplingParams(logprobs=count)
    rows = [wanted(params, vocab, row=i, seed=i) for i in range(4)]
    result = sampler.sample(logits, SampleBatch.build(rows))
    for i in range(4):
        exact = oracle.logprobs(logits[i].tolist())
        order = oracle.ranking(logits[i].tolist())
        token = int(result.tokens[i])
        assert result.logprobs[i] == pytest.approx(exact[token], abs=1e-6)
        assert result.ranks[i] == order.index(token) + 1
        ids, values = result.top(i)
        assert ids.tolist() == order[: vocab if count == -1 else count]
        assert values == pytest.approx([exact[t] for t in ids], abs=1e-6)


def test_logprobs_are_of_the_raw_distribution(make_sampler) -> None:
    logits = logits_of(50)
    plain = wanted(SamplingParams(temperature=0, logprobs=3), 50)
    changed = wanted(
        SamplingParams(
            temperature=0.1,
            top_k=1,
            logprobs=3,
            logit_bias={int(np.argmax(logits)): 50.0},
            frequency_penalty=2.0,
        ),
        50,
        slot=0,
    )
    resets = [SlotReset(0, [1], [2, 2])]
    result = make_sampler(50).sample(logits, SampleBatch.build([plain, changed], resets))
    assert result.tokens[0] == result.tokens[1]
    assert result.logprobs[0] == result.logprobs[1]
    assert result.top(0)[1].tolist() == result.top(1)[1].tolist()


@pytest.mark.parametrize("kwargs", PARAMS)
@pytest.mark.parametrize("vocab", [6, 60, 1100])
def test_each_draw_is_where_its_number_falls(make_sampler, kwargs: dict, vocab: int) -> None:
    """The drawn token is the one whose slice of [0, 1) holds the row's random number.

    The slices lie by likelihood with top_k, else by id.
    """
    logits = logits_of(vocab, seed=5)
    tokens = draw(make_sampler(vocab), logits, SamplingParams(**kwargs), range(150))
    probabilities = oracle.final_probabilities(logits[0].tolist(), oracle_row(kwargs))
    by_id = not 0 < kwargs.get("top_k", 0) < vocab
    order = list(range(vocab)) if by_id else oracle.ranking(logits[0].tolist())
    running = np.concatenate(([0.0], np.cumsum([probabilities[i] for i in order])))
    for seed, token in enumerate(tokens):
        place = order.index(token)
        assert probabilities[token] > 0
        u = numpy_sampler.uniform(seed, 0, 0)
        assert running[place] - 1e-9 <= u <= running[place + 1] + 1e-9


@pytest.mark.parametrize("kwargs", PARAMS[:3] + PARAMS[4:7] + PARAMS[10:])
def test_draws_follow_the_exact_distribution(make_native, kwargs: dict) -> None:
    logits = logits_of(40, seed=9, scale=1.0)
    count = 6000
    tokens = draw(make_native(40), logits, SamplingParams(**kwargs), range(count))
    exact = np.array(oracle.final_probabilities(logits[0].tolist(), oracle_row(kwargs)))
    seen = np.bincount(tokens, minlength=40)
    assert seen[exact == 0].sum() == 0
    rare = exact * count < 8  # merged into one cell, as the test's validity wants
    cells = [(seen[i], exact[i]) for i in np.flatnonzero(~rare)]
    if exact[rare].sum() * count >= 8:
        cells.append((seen[rare].sum(), exact[rare].sum()))
    statistic = sum((s - count * p) ** 2 / (count * p) for s, p in cells)
    assert statistic < oracle.chi_square_limit(len(cells) - 1)


def test_draws_of_choices_and_positions_are_independent(make_native) -> None:
    """Two keys that differ in one part give unrelated numbers: a chi-square on pairs."""
    logits = np.zeros((1, 4), np.float32)
    sampler = make_native(4)
    params = SamplingParams()
    for other in ({"choice": 1}, {"position": 1}, {"seed": 1}):
        pairs = np.zeros((4, 4))
        for seed in range(0, 4000, 2):
            keys = {"seed": seed, "choice": 0, "position": 0}
            moved = {k: v + other.get(k, 0) for k, v in keys.items()}
            batch = SampleBatch.build([wanted(params, 4, **keys), wanted(params, 4, **moved)])
            a, b = sampler.sample(logits, batch).tokens
            pairs[a, b] += 1
        assert ((pairs - 125) ** 2 / 125).sum() < oracle.chi_square_limit(15)


PENALTIES = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -1.0, "presence_penalty": -0.5, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("kwargs", PENALTIES)
def test_penalties_over_a_generation(make_sampler, kwargs: dict) -> None:
    """Thirty greedy steps; the slot is lost and rebuilt twice, as by preemption."""
    vocab, slot, prompt = 30, 3, (1, 2, 2, 5)
    sampler = make_sampler(vocab)
    names = {k.removesuffix("_penalty"): v for k, v in kwargs.items()}
    rng = np.random.default_rng(1)
    output: list[int] = []
    for step in range(30):
        logits = rng.standard_normal((1, vocab)).astype(np.float32)
        row = wanted(SamplingParams(temperature=0, **kwargs), vocab, slot=slot)
        rebuilt = step in (0, 10, 20)
        resets = [SlotReset(slot, prompt, tuple(output))] if rebuilt else []
        token = int(sampler.sample(logits, SampleBatch.build([row], resets)).tokens[0])
        exact = oracle.Row(temperature=0, prompt=prompt, output=tuple(output), **names)
        assert token == oracle.ranking(oracle.adjusted(logits[0].tolist(), exact))[0]
        output.append(token)


def test_bias_comes_before_penalties(make_sampler) -> None:
    # (1 + 3) / 2 = 2 loses to 2.5; penalties first would give 0.5 + 3 = 3.5 and win.
    logits = np.array([[1.0, 2.5]], np.float32)
    params = SamplingParams(temperature=0, logit_bias={0: 3.0}, repetition_penalty=2.0)
    row = wanted(params, 2, slot=0)
    result = make_sampler(2).sample(logits, SampleBatch.build([row], [SlotReset(0, [0])]))
    assert result.tokens.tolist() == [1]


def test_min_p_comes_before_top_p(make_sampler) -> None:
    # Of 0.5, 0.3, 0.1, 0.1 min_p 0.5 leaves two: 0.625 of the rest is past top_p 0.6 already.
    logits = np.log(np.array([[0.5, 0.3, 0.1, 0.1]])).astype(np.float32)
    tokens = draw(make_sampler(4), logits, SamplingParams(min_p=0.5, top_p=0.6), range(60))
    assert set(tokens) == {0}


def test_ties_at_top_k_go_to_the_lower_ids(make_sampler) -> None:
    logits = np.zeros((1, 100), np.float32)
    logits[0, 70] = 1.0
    tokens = draw(make_sampler(100), logits, SamplingParams(top_k=3), range(200))
    assert set(tokens) == {70, 0, 1}


def test_ties_at_top_p_go_to_the_lower_ids(make_sampler) -> None:
    logits = np.zeros((1, 8), np.float32)
    tokens = draw(make_sampler(8), logits, SamplingParams(top_p=0.3), range(200))
    assert set(tokens) == {0, 1, 2}


def test_the_nucleus_ends_where_its_mass_is_reached(make_sampler) -> None:
    """400 equal tokens, top_p 1/4: a hundred and not one more, as the sums are exact."""
    logits = np.zeros((1, 400), np.float32)
    tokens = draw(make_sampler(400), logits, SamplingParams(top_p=0.25), range(2000))
    assert set(tokens) == set(range(100))


def test_min_tokens_bans_until_reached(make_sampler) -> None:
    logits = np.array([[5.0, 4.0, 3.0, 0.0]], np.float32)
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[1])
    rows = [wanted(params, 4, eos_ids=(0,), generated=g, row=0) for g in (0, 1, 2)]
    result = make_sampler(4).sample(logits, SampleBatch.build(rows))
    assert result.tokens.tolist() == [2, 2, 0]


def test_minus_infinity_is_never_drawn(make_sampler) -> None:
    logits = np.full((1, 600), -np.inf, np.float32)
    logits[0, [3, 599]] = [0.0, -1.0]
    sampler = make_sampler(600)
    for kwargs in ({}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.1}, {"temperature": 100.0}):
        assert set(draw(sampler, logits, SamplingParams(**kwargs), range(50))) == {3, 599}
    row = wanted(SamplingParams(prompt_logprobs=3), 600, target=7)
    result = sampler.sample(logits, SampleBatch.build([row]))
    assert result.logprobs[0] == -np.inf
    assert result.ranks[0] == 9  # after the two finite ones and the ids 0, 1, 2, 4, 5, 6


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 8, 16])
def test_damaged_logits_fail_their_request_only(make_sampler, bad: float, where: int) -> None:
    logits = logits_of(17, rows=3)
    logits[1, where] = bad
    params = SamplingParams(temperature=0, logprobs=1)
    rows = [wanted(params, 17, row=i, request=f"req-{i}") for i in range(3)]
    result = make_sampler(17).sample(logits, SampleBatch.build(rows))
    assert [(f.index, f.request) for f in result.faults] == [(1, "req-1")]
    assert result.tokens[1] == -1
    for i in (0, 2):
        assert result.tokens[i] == oracle.ranking(logits[i].tolist())[0]
    with pytest.raises(RunError, match=r"request req-1: .*NaN"):
        result.check()


def test_nothing_left_to_draw_is_a_fault(make_sampler) -> None:
    logits = np.array([[-np.inf, 1.0, -np.inf]], np.float32)
    params = SamplingParams(min_tokens=1)
    rows = [wanted(params, 3, eos_ids=(1,), request="a")]
    with pytest.raises(RunError, match=r"request a: no token is left"):
        make_sampler(3).sample(logits, SampleBatch.build(rows)).check()
    with pytest.raises(RequestError, match="min_tokens"):
        wanted(params, 3, eos_ids=(0, 1, 2))


def test_prompt_rows_score_their_target(make_sampler) -> None:
    logits = logits_of(40, rows=2)
    params = SamplingParams(prompt_logprobs=2, repetition_penalty=1.5, logit_bias={4: 50.0})
    rows = [wanted(params, 40, row=i, target=t) for i, t in ((0, 4), (1, 39))]
    result = make_sampler(40).sample(logits, SampleBatch.build(rows))
    for i, target in enumerate((4, 39)):
        exact = oracle.logprobs(logits[i].tolist())
        assert result.tokens[i] == target
        assert result.logprobs[i] == pytest.approx(exact[target], abs=1e-6)
        assert result.top(i)[0].tolist() == oracle.ranking(logits[i].tolist())[:2]


def test_a_freed_slot_forgets(make_sampler) -> None:
    logits = np.array([[1.0, 0.9]], np.float32)
    params = SamplingParams(temperature=0, presence_penalty=1.0)
    sampler = make_sampler(2)
    row = wanted(params, 2, slot=0)

    def step(*resets: SlotReset) -> int:
        return int(sampler.sample(logits, SampleBatch.build([row], resets)).tokens[0])

    assert [step(SlotReset(0, [1])), step()] == [0, 1]
    sampler.sample(logits, SampleBatch.build([], [SlotReset(0)]))
    assert step(SlotReset(0, [1])) == 0


def test_batches_that_do_not_fit_are_refused(make_sampler) -> None:
    sampler = make_sampler(4)
    logits = np.zeros((2, 4), np.float32)
    plain = SamplingParams(prompt_logprobs=0)
    for bad in ({"row": 2}, {"row": -1}, {"target": 4}):
        with pytest.raises(RunError):
            sampler.sample(logits, SampleBatch.build([wanted(plain, 4, **bad)]))
    good = SampleBatch.build([wanted(plain, 4)])
    for wrong in (np.zeros((2, 5), np.float32), np.zeros((2, 4)), np.zeros((4, 2), np.float32).T):
        with pytest.raises(RunError):
            sampler.sample(wrong, good)
    with pytest.raises(RunError, match="outside the vocabulary"):
        sampler.sample(logits, SampleBatch.build([], [SlotReset(0, [4])]))


def test_penalties_need_a_slot_of_their_own() -> None:
    params = SamplingParams(presence_penalty=1.0)
    with pytest.raises(RunError, match="no penalty slot"):
        SampleBatch.build([wanted(params, 4)])
    with pytest.raises(RunError, match="twice"):
        SampleBatch.build([wanted(params, 4, slot=1), wanted(params, 4, slot=1)])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_row_draws_from_its_support(library, data: st.DataObject) -> None:
    values = st.one_of(st.floats(-50, 50, width=32), st.sampled_from([0.0, 1.0, -math.inf]))
    vocab = data.draw(st.integers(2, 24))
    logits = data.draw(st.lists(values, min_size=vocab, max_size=vocab))
    if max(logits) == -math.inf:
        logits[0] = 0.0
    kwargs = {
        "temperature": data.draw(st.sampled_from([0.0, 1e-4, 0.2, 1.0, 5.0])),
        "top_k": data.draw(st.sampled_from([0, 1, 2, 5])),
        "top_p": data.draw(st.sampled_from([1.0, 0.9, 0.31, 0.05])),
        "min_p": data.draw(st.sampled_from([0.0, 0.013, 0.47])),
    }
    params = SamplingParams(**kwargs)
    array = np.array([logits], np.float32)
    exact = oracle.final_probabilities(array[0].tolist(), oracle_row(kwargs))
    likely = {i for i, p in enumerate(exact) if p > 1e-12}
    for sampler in (native.NativeSampler(library, vocab), numpy_sampler.NumpySampler(vocab)):
        tokens = set(draw(sampler, array, params, range(20)))
        assert tokens <= {i for i, p in enumerate(exact) if p > 0}
        assert tokens & likely
        sampler.close()

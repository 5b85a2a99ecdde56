"""LLM over the toy model: outputs, logprobs, n, streams, aborts, errors, determinism."""

import gc
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from support.toy_device import ToyDevice, toy_greedy, toy_logits
from support.toy_llm import toy_llm

from ropeway.compiler.errors import InputError, RequestError, RunError
from ropeway.runtime.outputs import RequestOutput
from ropeway.runtime.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("overlap")

VOCAB = 97
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()


def raw_logprobs(tokens: list[int]) -> np.ndarray:
    logits = toy_logits(tokens, VOCAB).astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def answer(output: RequestOutput) -> list[tuple[object, ...]]:
    return [
        (c.token_ids, c.logprobs, c.cumulative_logprob, c.finish_reason, c.stop_reason)
        for c in output.outputs
    ]


def test_greedy_outputs_in_the_order_of_the_prompts() -> None:
    prompts = [prompt(n) for n in (9, 1, 30, 4)]
    with toy_llm() as llm:
        outputs = llm.generate(prompts, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [toy_greedy(p, 6, VOCAB) for p in prompts]
    for output, ids in zip(outputs, prompts, strict=True):
        assert output.prompt is None and output.prompt_token_ids == ids
        assert output.prompt_logprobs is None and output.num_cached_tokens == 0
        choice = output.outputs[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "length", None)
        assert choice.logprobs is None and choice.cumulative_logprob is None


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_few_tokens(max_tokens: int) -> None:
    with toy_llm() as llm:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        [output] = llm.generate(prompt(5), params)
    assert output.outputs[0].token_ids == toy_greedy(prompt(5), max_tokens, VOCAB)


def test_no_limit_goes_up_to_the_models_length_or_what_the_cache_holds() -> None:
    params = SamplingParams(temperature=0, max_tokens=None)
    for blocks, total in [(65, 64), (6, 21)]:  # five blocks of four: the last token needs no room
        with toy_llm(blocks=blocks) as llm:
            [output] = llm.generate(prompt(5), params)
        assert output.outputs[0].token_ids == toy_greedy(prompt(5), total - 5, VOCAB)
        assert output.outputs[0].finish_reason == "length"


def test_too_many_tokens_end_at_the_models_length() -> None:
    with toy_llm() as llm:
        [output] = llm.generate(prompt(60), SamplingParams(temperature=0, max_tokens=500))
    assert output.outputs[0].token_ids == toy_greedy(prompt(60), 4, VOCAB)


@pytest.mark.parametrize("length", [63, 64, 65])
def test_prompts_around_the_models_length(length: int) -> None:
    with toy_llm() as llm:
        if length == 63:
            [output] = llm.generate(prompt(length), GREEDY)
            assert output.outputs[0].token_ids == toy_greedy(prompt(length), 1, VOCAB)
            return
        with pytest.raises(RequestError, match=f"{length} tokens leave no room.* 64 ") as caught:
            llm.generate(prompt(length), GREEDY)
        assert caught.value.field == "prompt"
        assert not llm._engine.core.has_work


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ([[]], "no tokens"),
        ([[1, 97]], "token id 97 at 1 .*0 to 96"),
        ([[-1]], "token id -1 at 0"),
        ([[2**70]], "outside the vocabulary"),
        ([[1.5]], "isn't a whole number"),
        ([["a"]], "isn't a whole number"),
        ([[True]], "isn't a whole number"),
        ([[[1], [2]]], "isn't a whole number"),
    ],
)
def test_bad_ids_are_refused_and_nothing_was_queued(bad: list[list[int]], match: str) -> None:
    with toy_llm() as llm:
        for prompts in (bad, [prompt(4), *bad]):
            with pytest.raises(RequestError, match=match) as caught:
                llm.generate(prompts, GREEDY)
            assert caught.value.field == "prompt"
            assert not llm._engine.core.has_work
        [output] = llm.generate(prompt(4), GREEDY)
        assert output.outputs[0].token_ids == toy_greedy(prompt(4), 6, VOCAB)


def test_ids_in_parameters_are_held_against_the_vocabulary() -> None:
    with toy_llm() as llm:
        for field, value in [("stop_token_ids", [97]), ("logit_bias", {97: 1.0})]:
            with pytest.raises(RequestError) as caught:
                llm.generate(prompt(4), SamplingParams(**{field: value}))
            assert caught.value.field == field
        with pytest.raises(RequestError) as caught:
            llm.generate(prompt(4), SamplingParams(stop="x"))
        assert caught.value.field == "stop"
        assert not llm._engine.core.has_work


def test_text_without_a_tokenizer_is_refused_plainly() -> None:
    engine_less = toy_llm()
    model = SimpleNamespace(name="m")
    engine_less._engine.artifact = SimpleNamespace(
        manifest=SimpleNamespace(model=model, target="toy")
    )
    with pytest.raises(InputError, match="m was compiled without a tokenizer"):
        engine_less.generate("hello", GREEDY)


def test_prompt_shapes() -> None:
    with toy_llm() as llm:
        assert llm.generate([], GREEDY) == []
        assert len(llm.generate((1, 2), GREEDY)) == 1
        assert len(llm.generate([(1, 2), [3]], [GREEDY, GREEDY])) == 2
        with pytest.raises(RequestError, match="3 of them for 1 prompts"):
            llm.generate([1, 2], [GREEDY] * 3)
        for bad in (7, b"ab", [[1], 2]):
            with pytest.raises(RequestError) as caught:
                llm.generate(bad, GREEDY)
            assert caught.value.field == "prompts"


# -- logprobs -------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_logprobs_are_of_the_raw_distribution(chunk: int | None) -> None:
    ids = prompt(11)
    params = SamplingParams(
        temperature=0.7, seed=3, max_tokens=5, logprobs=3, prompt_logprobs=2, presence_penalty=1.0
    )
    with toy_llm(max_prefill_chunk=chunk) as llm:
        [output] = llm.generate(ids, params)
    choice = output.outputs[0]
    tokens = list(ids)
    assert choice.logprobs is not None and choice.cumulative_logprob is not None
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        check_entry(entry, token, tokens, 3)
        tokens.append(token)
    total = sum(e[t].logprob for t, e in zip(choice.token_ids, choice.logprobs, strict=True))
    assert choice.cumulative_logprob == pytest.approx(total, abs=1e-6)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(ids)
    for index, entry in enumerate(output.prompt_logprobs[1:], 1):
        assert entry is not None
        check_entry(entry, ids[index], ids[:index], 2)


def check_entry(entry: dict, token: int, before: list[int], count: int) -> None:
    want = raw_logprobs(before)
    order = np.argsort(-want, kind="stable").tolist()
    assert next(iter(entry)) == token
    assert set(entry) == {token, *order[:count]}
    for candidate, logprob in entry.items():
        assert logprob.logprob == pytest.approx(want[candidate], abs=1e-4)
        assert logprob.rank == order.index(candidate) + 1
        assert logprob.decoded_token == ""


def test_prompt_logprobs_do_not_let_the_cache_swallow_rows() -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    with toy_llm() as llm:
        first = llm.generate(prompt(13), GREEDY)[0]
        scored = llm.generate(prompt(13), params)[0]
        again = llm.generate(prompt(13), GREEDY)[0]
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == 13
    assert (first.num_cached_tokens, scored.num_cached_tokens, again.num_cached_tokens) == (
        0,
        0,
        12,
    )


# -- determinism ----------------------------------------------------------------------------

SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=8, logprobs=1, n=3)
PENALTIES = SamplingParams(
    temperature=0.9,
    seed=5,
    max_tokens=12,
    logprobs=0,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.4,
    n=2,
)


@pytest.mark.parametrize("params", [SEEDED, PENALTIES])
def test_a_seed_means_the_same_wherever_it_runs(params: SamplingParams) -> None:
    ids = prompt(9)
    with toy_llm() as llm:
        [alone] = llm.generate(ids, params)
        [hit] = llm.generate(ids, params)
        assert hit.num_cached_tokens == 8
        beside = [prompt(n, 4) for n in (3, 17, 8, 5, 2, 11)]
        batch = llm.generate(
            [*beside[:3], ids, *beside[3:]], [GREEDY] * 3 + [params] + [GREEDY] * 3
        )
        for output, others in zip(batch[:3] + batch[4:], beside, strict=True):
            assert output.outputs[0].token_ids == toy_greedy(others, 6, VOCAB)
    chunked = [
        toy_llm(max_prefill_chunk=chunk, caching=False).generate(ids, params)[0]
        for chunk in (1, 7, 64)
    ]
    [narrow] = toy_llm(max_num_seqs=1).generate(ids, params)
    for other in (hit, batch[3], *chunked, narrow):
        assert answer(other) == answer(alone)
    assert len({tuple(c.token_ids) for c in alone.outputs}) == params.n


@pytest.mark.parametrize("params", [SEEDED, PENALTIES])
def test_preemption_changes_nothing(params: SamplingParams) -> None:
    ids = prompt(9)
    [calm] = toy_llm().generate(ids, params)
    llm = toy_llm(max_num_seqs=3)
    stream = llm.stream(ids, params)
    got: dict[int, list[int]] = {}
    urgent = 0
    for delta in stream:
        got.setdefault(delta.index, []).extend(delta.token_ids)
        if len(got.get(0, [])) in (2, 5) and urgent < 2 and delta.index == 0:
            urgent += 1
            llm.generate([prompt(4, k) for k in range(3)], GREEDY, priority=-1)
    assert llm.stats().preemptions >= 2 * params.n - 2
    assert [got[i] for i in range(params.n)] == [c.token_ids for c in calm.outputs]


def test_unseeded_requests_depend_on_the_engines_seed_and_their_turn() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8)
    ids = prompt(5)

    def run(seed: int) -> list[list[int]]:
        with toy_llm(seed=seed) as llm:
            return [o.outputs[0].token_ids for o in llm.generate([ids, ids], params)]

    first, second = run(0)
    assert first != second
    assert run(0) == [first, second] and run(1) != [first, second]


# -- ends -----------------------------------------------------------------------------------


def test_end_and_stop_tokens() -> None:
    ids = prompt(7)
    free = toy_greedy(ids, 10, VOCAB)
    at = free.index(free[4])
    with toy_llm(eos_ids=(free[4],)) as llm:
        params = {"temperature": 0, "max_tokens": 10}
        [ended] = llm.generate(ids, SamplingParams(**params))
        [stopped] = llm.generate(ids, SamplingParams(**params, stop_token_ids=[free[4]]))
        [ignored] = llm.generate(ids, SamplingParams(**params, ignore_eos=True))
        [late] = llm.generate(ids, SamplingParams(**params, min_tokens=at + 2))
    for output, reason in [(ended, None), (stopped, free[4])]:
        choice = output.outputs[0]
        assert choice.token_ids == free[: at + 1]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", reason)
    assert ignored.outputs[0].token_ids == free
    assert free[4] not in late.outputs[0].token_ids[: at + 2]


def test_stream_is_the_same_as_generate() -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=7, n=3, logprobs=1)
    with toy_llm() as llm:
        [whole] = llm.generate(prompt(6), params)
        deltas = list(llm.stream(prompt(6), params))
    for choice in whole.outputs:
        mine = [d for d in deltas if d.index == choice.index]
        assert [t for d in mine for t in d.token_ids] == choice.token_ids
        assert [e for d in mine for e in d.logprobs or []] == choice.logprobs
        assert [d.finish_reason for d in mine] == [None] * 6 + ["length"]


def test_interleaved_streams_and_a_batch_share_the_engine() -> None:
    with toy_llm() as llm:
        one, two = llm.stream(prompt(5), GREEDY), llm.stream(prompt(9), GREEDY)
        got: list[list[int]] = [[], []]
        for _ in range(3):
            got[0] += next(one).token_ids
            got[1] += next(two).token_ids
        [batch] = llm.generate(prompt(12), GREEDY)
        got[0] += [t for d in one for t in d.token_ids]
        got[1] += [t for d in two for t in d.token_ids]
    assert got == [toy_greedy(prompt(5), 6, VOCAB), toy_greedy(prompt(9), 6, VOCAB)]
    assert batch.outputs[0].token_ids == toy_greedy(prompt(12), 6, VOCAB)


def test_a_stream_checks_its_prompt_when_it_is_made() -> None:
    with toy_llm() as llm, pytest.raises(RequestError):
        llm.stream([VOCAB], GREEDY)


def test_a_stream_that_is_closed_early_gives_its_blocks_back() -> None:
    with toy_llm() as llm:
        stream = llm.stream(prompt(5), GREEDY)
        next(stream)
        assert llm.stats().blocks_used > 0
        stream.close()
        assert llm.stats().blocks_used == 0 and llm.stats().running == 0


def test_a_dropped_stream_ends_with_the_next_look_at_the_engine() -> None:
    with toy_llm() as llm:
        stream = llm.stream(prompt(5), GREEDY)
        next(stream)
        assert llm.stats().running == 1
        del stream
        gc.collect()
        assert llm.stats().running == 0 and llm.stats().blocks_used == 0
        with llm.stream(prompt(5), GREEDY) as stream:
            assert llm.stats().waiting == 1
        assert llm.stats().waiting == 0
        assert list(stream) == []


def test_abort_between_deltas_ends_every_choice_once() -> None:
    with toy_llm() as llm:
        stream = llm.stream(prompt(5), SamplingParams(temperature=1, seed=1, n=2, max_tokens=20))
        deltas = [next(stream) for _ in range(5)]
        assert llm.abort(deltas[0].request_id)
        assert not llm.abort(deltas[0].request_id)
        deltas += list(stream)
        for index in range(2):
            ends = [d.finish_reason for d in deltas if d.index == index and d.finish_reason]
            assert ends == ["abort"]
        assert llm.stats().blocks_used == 0


def test_abort_before_the_first_step_ends_the_choices_that_are_not_forked_yet() -> None:
    with toy_llm() as llm:
        stream = llm.stream(prompt(5), SamplingParams(n=3, max_tokens=20))
        assert llm.abort()
        assert [(d.index, d.finish_reason, d.token_ids) for d in stream] == [
            (i, "abort", []) for i in range(3)
        ]


def test_threads_share_one_engine() -> None:
    llm = toy_llm()
    results: dict[int, list[int]] = {}

    def work(seed: int) -> None:
        [output] = llm.generate(prompt(5 + seed, seed), GREEDY)
        results[seed] = output.outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {s: toy_greedy(prompt(5 + s, s), 6, VOCAB) for s in range(6)}


def test_a_second_thread_joins_while_the_first_is_stepping() -> None:
    llm = toy_llm()
    started, order = threading.Event(), []

    def long_run() -> None:
        stream = llm.stream(prompt(3), SamplingParams(temperature=0, max_tokens=None))
        next(stream)
        started.set()
        llm.generate([prompt(3)] * 20, SamplingParams(temperature=0, max_tokens=50))
        stream.close()
        order.append("long")

    thread = threading.Thread(target=long_run)
    thread.start()
    assert started.wait(30)
    llm.generate(prompt(5), SamplingParams(temperature=0, max_tokens=2), priority=-1)
    order.append("short")
    thread.join(60)
    assert order == ["short", "long"]


def test_nothing_is_kept_of_finished_requests() -> None:
    llm = toy_llm(tokenizer=None)
    for turn in range(40):
        params = SamplingParams(
            temperature=1, n=1 + turn % 3, max_tokens=1 + turn % 7, presence_penalty=turn % 2
        )
        stream = llm.stream(prompt(turn % 13 + 1, turn), params)
        for _ in range(turn % 5):
            next(stream, None)
        if turn % 4 == 0:
            stream.close()
        else:
            list(stream)
    core = llm._engine.core
    assert not llm._assemblies and not core._sampling and not core._pending
    scheduler = core.scheduler
    assert not scheduler._live and not scheduler._running and scheduler.waiting == 0
    assert llm.stats().blocks_used == 0


# -- failures -------------------------------------------------------------------------------


def test_a_device_failure_ends_every_request_and_the_engine_lives_on() -> None:
    device = ToyDevice()
    llm = toy_llm(device=device)
    stream = llm.stream(prompt(5), GREEDY)
    next(stream)
    device.fail_next = True
    with pytest.raises(RunError, match="planted"):
        llm.generate(prompt(8), GREEDY)
    with pytest.raises(RunError, match="planted"):
        list(stream)
    assert llm.stats().blocks_used == 0
    [output] = llm.generate(prompt(8), GREEDY)
    assert output.outputs[0].token_ids == toy_greedy(prompt(8), 6, VOCAB)


def test_one_sick_row_fails_its_request_alone() -> None:
    class Sick(ToyDevice):
        """Logits of a one-token step of the request with token 7 turn to NaN."""

        def submit(self, bucket, inputs):
            handle = super().submit(bucket, inputs)
            for row, at in enumerate(inputs.rows):
                if inputs.ids[at] == 7 and inputs.positions[at] == 2:
                    handle.logits[row] = np.nan
            return handle

    llm = toy_llm(device=Sick())
    good, sick = llm.stream(prompt(5), GREEDY), llm.stream([1, 2, 7], GREEDY)
    tokens = [t for d in good for t in d.token_ids]
    assert tokens == toy_greedy(prompt(5), 6, VOCAB)
    with pytest.raises(RunError, match=r"request 1: .*NaN"):
        list(sick)
    assert llm.stats().blocks_used == 0


def test_a_closed_llm_says_so() -> None:
    llm = toy_llm()
    stream = llm.stream(prompt(4), GREEDY)
    llm.close()
    llm.close()
    assert llm._engine.device.closed
    with pytest.raises(RunError, match="closed"):
        llm.generate(prompt(4), GREEDY)
    with pytest.raises(RunError, match="closed"):
        next(stream)


def test_stats_add_up() -> None:
    with toy_llm() as llm:
        llm.generate([prompt(9), prompt(9)], GREEDY)
        llm.generate(prompt(9), GREEDY)
        stats = llm.stats()
    assert stats.prompt_tokens == 27 and stats.output_tokens == 18
    assert (stats.prefix_queries, stats.prefix_hits) == (27, 8)
    # The last token of each is never computed; the third found eight tokens in the cache.
    assert stats.computed_tokens == 3 * (9 + 5) - 8
    assert stats.blocks_total == 64 and stats.blocks_free == 64 and stats.blocks_used == 0
    assert stats.native_seconds > 0 and stats.host_seconds > 0
    assert stats.steps == 12 and stats.running == stats.waiting == 0

"""The scheduler over the toy model: every token against brute force, every block accounted for."""

import numpy as np
import pytest
from support.toy_device import toy_greedy, toy_logits
from support.toy_loop import BLOCK, ToyLoop

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import RequestError
from ropeway.runtime.engine.request import Request, State

VOCAB = 97


@pytest.fixture(autouse=True, params=[1, 2])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every test runs with one step in flight and with two."""
    monkeypatch.setattr(ToyLoop, "usual_depth", request.param)
    return request.param


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()


def expect(loop: ToyLoop, name: str, ids: list[int], output: int = 4) -> None:
    assert loop.tokens[name, 0] == toy_greedy(ids, output, VOCAB)
    assert loop.ends[name, 0] == ["length"]


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 13])
def test_repeated_prompt_hits_all_it_can_and_stays_right(length: int) -> None:
    loop = ToyLoop()
    ids = prompt(length)
    hits = []
    for turn in range(10):
        loop.add(f"{turn}", ids)
        loop.drain()
        expect(loop, f"{turn}", ids)
        hits.append(loop.cached[f"{turn}"])
    # The first request also published blocks that its answer filled, but only whole blocks of
    # the prompt's own tokens match, and one token is always computed.
    full = length // BLOCK * BLOCK
    assert hits == [0] + [full - (full == length)] * 9
    assert loop.scheduler.counters.prefix_hits == sum(hits)
    assert loop.scheduler.counters.prefix_queries == 10 * length


def test_exact_blocks_recompute_one_token_in_a_copy() -> None:
    loop = ToyLoop()
    ids = prompt(2 * BLOCK)
    loop.add("a", ids, output=1)
    loop.drain()
    assert loop.device.copied == []
    loop.add("b", ids, output=1)
    plan = loop.run_step()
    assert plan is not None
    assert [(c.start, c.count) for c in plan.chunks] == [(2 * BLOCK - 1, 1)]
    [(source, destination)] = loop.device.copied
    assert source != destination


def test_ten_identical_requests_at_once_are_equal() -> None:
    loop = ToyLoop()
    ids = prompt(11)
    for index in range(10):
        loop.add(f"{index}", ids, output=6)
    loop.drain()
    for index in range(10):
        expect(loop, f"{index}", ids, 6)


def test_caching_off_computes_everything_again() -> None:
    loop = ToyLoop(caching=False)
    ids = prompt(12)
    for turn in range(3):
        loop.add(f"{turn}", ids)
        loop.drain()
        expect(loop, f"{turn}", ids)
        assert loop.cached[f"{turn}"] == 0


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 2, 4, 5])
def test_a_last_chunk_of_one_token_beside_another_prompt(k: int, chunk: int) -> None:
    loop = ToyLoop(chunk=chunk, caching=False)
    first, second = prompt(k * chunk + 1, 1), prompt(k * chunk + 1, 2)
    loop.add("a", first)
    loop.add("b", second)
    loop.drain()
    expect(loop, "a", first)
    expect(loop, "b", second)
    assert all(i.counts[0] <= 2 * chunk for _, i in loop.device.steps)


def test_a_step_of_one_token_each_is_a_decode_step() -> None:
    loop = ToyLoop(chunk=1)
    loop.add("a", prompt(3), output=2)
    loop.drain()
    assert {bucket.kind for bucket, _ in loop.device.steps} == {"decode"}
    # No row is wanted before the prompt's last token.
    assert [inputs.counts[2] for _, inputs in loop.device.steps] == [0, 0, 1, 1]


def test_running_sequences_keep_a_token_beside_a_long_prompt() -> None:
    loop = ToyLoop(budget=8, seqs=4)
    loop.add("short", prompt(2), output=12)
    loop.run_step()
    loop.add("urgent", prompt(30), output=2, priority=-1)
    loop.finish_planned()
    for _ in range(5):
        plan = loop.run_step()
        assert plan is not None
        assert {c.seq.request.request_id for c in plan.chunks} == {"short", "urgent"}
    loop.drain()
    expect(loop, "short", prompt(2), 12)
    expect(loop, "urgent", prompt(30), 2)


def test_priority_then_arrival_decides_who_starts() -> None:
    loop = ToyLoop(seqs=1)
    for name, priority in [("late", 5), ("a", 0), ("b", 0), ("first", -3)]:
        loop.add(name, prompt(3, len(name)), output=1, priority=priority)
    order = []
    while (plan := loop.run_step()) is not None:
        order.append(plan.chunks[0].seq.request.request_id)
    assert order == ["first", "a", "b", "late"]


def test_an_urgent_request_takes_the_place_of_a_less_urgent_one() -> None:
    loop = ToyLoop(seqs=1)
    loop.add("slow", prompt(5), output=8)
    loop.run_step()
    loop.add("urgent", prompt(6), output=2, priority=-1)
    loop.finish_planned()
    plan = loop.run_step()
    assert plan is not None and plan.chunks[0].seq.request.request_id == "urgent"
    loop.drain()
    expect(loop, "slow", prompt(5), 8)
    expect(loop, "urgent", prompt(6), 2)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("when", [(1, 3), (2, 9), (5, 6)])
def test_every_request_preempted_twice_is_unchanged(caching: bool, when: tuple[int, int]) -> None:
    loop = ToyLoop(seqs=2, chunk=3, caching=caching)
    prompts = {f"{i}": prompt(5, i) for i in range(2)}
    seqs = []
    for name, ids in prompts.items():
        loop.add(name, ids, output=19)
        seqs += loop.scheduler.sequences(name)
    for turn, steps in enumerate(when):
        for _ in range(steps):
            loop.run_step()
        for index in range(2):
            loop.add(f"urgent{turn}.{index}", prompt(4, 8), output=2, priority=-1)
        while any(f"urgent{turn}.{i}" not in {k[0] for k in loop.ends} for i in range(2)):
            loop.run_step()
    loop.drain()
    for name, ids in prompts.items():
        expect(loop, name, ids, 19)
        assert loop.cached[name] == 0  # as it was at the first start
    assert [seq.preemptions for seq in seqs] == [2, 2]
    assert loop.pool.available == loop.pool.capacity


def test_a_pool_too_small_for_all_still_serves_all() -> None:
    loop = ToyLoop(blocks=8)  # six blocks each, seven in all
    for index in range(5):
        loop.add(f"{index}", prompt(5, index), output=19)
    loop.drain()
    for index in range(5):
        expect(loop, f"{index}", prompt(5, index), 19)
    assert loop.scheduler.counters.preemptions > 0


def test_a_long_prompt_is_not_starved_by_later_short_ones() -> None:
    loop = ToyLoop(blocks=9, seqs=4)
    for index in range(3):
        loop.add(f"early{index}", prompt(4, index), output=4)
    loop.run_step()
    loop.add("long", prompt(26), output=3)  # needs 7 of the 8 blocks: waits for the early ones
    for index in range(40):
        loop.add(f"late{index}", prompt(4, index), output=2)
        loop.run_step()
    assert loop.ends["long", 0] == ["length"]
    loop.drain()
    expect(loop, "long", prompt(26), 3)


def test_a_recorded_run_replays() -> None:
    def record() -> list[list[tuple[str, int, int, int, tuple[int, ...]]]]:
        loop = ToyLoop(blocks=10, chunk=3, seqs=3)
        rng = np.random.default_rng(5)
        steps = []
        for index in range(60):
            if index % 3 == 0:
                length = int(rng.integers(1, 14))
                loop.add(f"{index}", prompt(length, index % 4), choices=1 + index % 2)
            if index % 7 == 6:
                loop.scheduler.abort(f"{index - 6 - index % 3}")
            plan = loop.run_step()
            steps.append(
                [
                    (c.seq.request.request_id, c.seq.choice, c.start, c.count, tuple(c.seq.blocks))
                    for c in (plan.chunks if plan else [])
                ]
            )
        loop.drain()
        return steps

    assert record() == record()


def test_fork_shares_the_prompt_and_copies_on_write() -> None:
    loop = ToyLoop()
    ids = prompt(BLOCK + 2)
    loop.add("n", ids, output=5, choices=3)
    loop.run_step()
    held = {block for seq in loop.scheduler.running for block in seq.blocks}
    assert len(held) == 2 and len(loop.scheduler.running) == 3
    loop.drain()
    # Two choices copy the half-filled block; the last one left writes in place.
    assert len(loop.device.copied) == 2
    best = np.argsort(-toy_logits(ids, VOCAB), kind="stable")[:3].tolist()
    for choice, first in enumerate(best):
        rest = toy_greedy([*ids, first], 4, VOCAB)
        assert loop.tokens["n", choice] == [first, *rest]
        assert loop.ends["n", choice] == ["length"]
    assert loop.pool.available == loop.pool.capacity


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, 2 * BLOCK + 1])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("blocks", [7, 33])
def test_more_choices_than_slots_and_blocks(length: int, caching: bool, blocks: int) -> None:
    loop = ToyLoop(seqs=3, blocks=blocks, caching=caching)
    ids = prompt(length)
    loop.add("n", ids, output=7, choices=6)
    loop.add("other", prompt(9, 3), output=5)
    loop.drain()
    best = np.argsort(-toy_logits(ids, VOCAB), kind="stable")[:6].tolist()
    for choice, first in enumerate(best):
        assert loop.tokens["n", choice] == [first, *toy_greedy([*ids, first], 6, VOCAB)]
    expect(loop, "other", prompt(9, 3), 5)
    assert loop.pool.available == loop.pool.capacity


def test_stop_ids_end_a_choice_and_say_so_only_when_asked_for() -> None:
    ids = prompt(6)
    answer = toy_greedy(ids, 8, VOCAB)
    for shown, reason in [(True, answer[3]), (False, None)]:
        loop = ToyLoop()
        loop.add("a", ids, output=8, stop_ids={answer[3]: shown})
        progress = []
        while loop.plan_step() is not None:
            progress += loop.finish_step()
        stop = answer.index(answer[3])
        assert loop.tokens["a", 0] == answer[: stop + 1]
        assert (progress[-1].finish_reason, progress[-1].stop_reason) == ("stop", reason)


# -- prompt logprobs ------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("rows", [2, 3, 8])
def test_every_prompt_row_is_scored_once_within_the_rows_of_a_bucket(
    chunk: int | None, rows: int
) -> None:
    buckets = [Bucket("decode", 2, 2, 2), Bucket("mixed", 64, 2, rows)]
    loop = ToyLoop(chunk=chunk, buckets=buckets)
    for turn in range(3):  # the later ones could hit the cache, which would swallow rows
        ids = prompt(13)
        loop.add(f"{turn}", ids, wants_prompt_logprobs=True)
        loop.add(f"beside{turn}", prompt(5, turn))
        loop.drain()
        expect(loop, f"{turn}", ids)
        assert [position for position, _ in loop.scored[f"{turn}"]] == list(range(12))
        for position, value in loop.scored[f"{turn}"]:
            assert value == float(toy_logits(ids[: position + 1], VOCAB).sum())
        assert loop.cached[f"{turn}"] == 0


def test_prompt_rows_done_before_a_preemption_are_not_scored_again() -> None:
    loop = ToyLoop(chunk=4, seqs=1)
    ids = prompt(18)
    loop.add("a", ids, wants_prompt_logprobs=True)
    loop.run_step()
    loop.run_step()
    loop.add("urgent", prompt(4), output=1, priority=-1)
    loop.drain()
    expect(loop, "a", ids)
    assert [position for position, _ in loop.scored["a"]] == list(range(17))


@pytest.mark.parametrize("length", [1, 2, 9])
def test_scoring_alone_draws_nothing(length: int) -> None:
    loop = ToyLoop()
    loop.add("a", prompt(length), output=0, wants_prompt_logprobs=True)
    loop.drain()
    assert ("a", 0) not in loop.tokens and loop.ends["a", 0] == ["length"]
    assert len(loop.scored.get("a", [])) == length - 1


# -- aborts ---------------------------------------------------------------------------------


def abort_case(state: str) -> ToyLoop:
    """A loop in which "x" is in `state`, beside a request that must not notice."""
    loop = ToyLoop(chunk=4, seqs=2)
    loop.add("bystander", prompt(7, 5), output=15)
    loop.run_step()
    if state in ("queued", "preempted"):
        loop.add("other", prompt(6, 6), output=12, priority=-2 if state == "queued" else 0)
    if state == "queued":
        loop.run_step()
    if state == "preempted":
        loop.add("x", prompt(9), output=9, priority=1)
        loop.scheduler.abort("other")
        loop.run_step()
        loop.add("pusher", prompt(5, 9), output=2)
        loop.finish_planned()
        loop.run_step()
        assert loop.scheduler.sequences("x")[0].state is State.WAITING
        assert loop.scheduler.sequences("x")[0].preemptions == 1
        return loop
    loop.add("x", prompt(9), output=9, choices=2 if state == "forked" else 1)
    steps = {"queued": 0, "unscheduled": 0, "mid-prefill": 1, "decoding": 4, "forked": 4}[state]
    for _ in range(steps):
        loop.run_step()
    return loop


@pytest.mark.parametrize(
    "state", ["queued", "unscheduled", "mid-prefill", "decoding", "preempted", "forked"]
)
@pytest.mark.parametrize("in_flight", [False, True])
def test_abort_gives_every_block_back(state: str, in_flight: bool) -> None:
    loop = abort_case(state)
    if in_flight:
        plan = loop.plan_step()
        assert plan is not None
        assert loop.scheduler.abort("x")
        cached = loop.pool.cached
        progress = loop.finish_step()
        assert all(item.seq.request.request_id != "x" for item in progress)
        own = [c for c in plan.chunks if c.seq.request.request_id == "x"]
        if state == "mid-prefill":
            # What the aborted step computed is not published.
            assert own and loop.pool.cached - cached <= len(plan.chunks) - len(own)
    else:
        assert loop.scheduler.abort("x")
    assert not loop.scheduler.abort("x")
    loop.drain()
    expect(loop, "bystander", prompt(7, 5), 15)
    assert loop.pool.available == loop.pool.capacity
    assert not any(key[0] == "x" for key in loop.ends)
    # The same prompt again is right: no half-written block was left in the cache.
    loop.add("again", prompt(9), output=9)
    loop.drain()
    expect(loop, "again", prompt(9), 9)


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("in_flight", [False, True])
def test_cancel_and_retry_with_a_shared_prefix_leaves_the_canaries_alone(
    steps: int, in_flight: bool
) -> None:
    stem = prompt(10)
    loop = ToyLoop(blocks=17, chunk=4, seqs=4)
    canaries = {f"canary{i}": [*stem, i, i + 1] for i in range(3)}
    for name, ids in canaries.items():
        loop.add(name, ids, output=14)
    for turn in range(4):
        loop.add(f"x{turn}", [*stem, 50 + turn % 2], output=9)
        for _ in range(steps):
            loop.run_step()
        plan = loop.plan_step() if in_flight else None
        loop.scheduler.abort(f"x{turn}")
        if plan is not None:
            loop.finish_step()
    loop.add("retry", [*stem, 50], output=9)
    loop.drain()
    expect(loop, "retry", [*stem, 50], 9)
    for name, ids in canaries.items():
        expect(loop, name, ids, 14)
    assert loop.pool.available == loop.pool.capacity


def test_ending_one_choice_leaves_the_others() -> None:
    loop = ToyLoop()
    ids = prompt(6)
    loop.add("n", ids, output=8, choices=3)
    loop.run_step()
    loop.run_step()
    loop.scheduler.abort_choice(loop.scheduler.sequences("n")[1])
    loop.drain()
    best = np.argsort(-toy_logits(ids, VOCAB), kind="stable")[:3].tolist()
    for choice in (0, 2):
        assert loop.tokens["n", choice] == [
            best[choice],
            *toy_greedy([*ids, best[choice]], 7, VOCAB),
        ]
    assert ("n", 1) not in loop.ends
    assert loop.pool.available == loop.pool.capacity


def test_abandoned_step_leaves_the_requests_to_start_over() -> None:
    loop = ToyLoop()
    ids = prompt(9)
    loop.add("a", ids)
    loop.add("b", ids[:6], output=6)
    loop.run_step()
    assert loop.plan_step() is not None
    loop.fail_step()
    loop.drain()
    expect(loop, "a", ids)
    expect(loop, "b", ids[:6], 6)


# -- what can't be served -------------------------------------------------------------------


def test_longer_than_the_pool_is_refused_at_add() -> None:
    loop = ToyLoop(blocks=4)  # three blocks: 12 tokens
    loop.add("fits", prompt(9), output=4)  # the 13th token is never computed
    loop.drain()
    expect(loop, "fits", prompt(9), 4)
    with pytest.raises(RequestError, match=r"max_tokens: .*need 13 tokens.*only 12.*kv_cache"):
        loop.add("large", prompt(9), output=5)
    assert loop.scheduler.unfinished == 0 and loop.run_step() is None


def test_longer_than_the_program_and_empty_and_doubled_are_refused() -> None:
    loop = ToyLoop(max_model_len=16)
    loop.add("full", prompt(15), output=1)
    for ids, output in [(prompt(16), 1), (prompt(17), 0)]:
        with pytest.raises(RequestError, match="program holds 16"):
            loop.add("long", ids, output)
    with pytest.raises(RequestError, match="already running"):
        loop.add("full", prompt(3))
    with pytest.raises((RequestError, IndexError)):
        loop.scheduler.add(Request("empty", np.zeros(0, np.int32), 4))
    loop.drain()
    assert loop.ends["full", 0] == ["length"]


def test_salt_keeps_equal_prompts_apart() -> None:
    loop = ToyLoop()
    ids = prompt(9)
    for name, salt in [("a", "tenant a"), ("b", "tenant b"), ("c", "tenant a"), ("d", "")]:
        loop.add(name, ids, salt=salt)
        loop.drain()
    assert loop.cached == {"a": 0, "b": 0, "c": 8, "d": 0}
    for name in "abcd":
        expect(loop, name, ids)


def test_colliding_digests_never_change_tokens() -> None:
    loop = ToyLoop(digest=lambda data: bytes([sum(data) % 3]))
    for index in range(20):
        ids = prompt(5 + index % 7, index % 5)
        loop.add(f"{index}", ids)
        loop.drain()
        expect(loop, f"{index}", ids)


def test_eviction_under_a_stream_of_prompts() -> None:
    loop = ToyLoop(blocks=8)
    for index in range(30):
        ids = [*prompt(8, 1), *prompt(index % 6 + 1, index)]
        loop.add(f"{index}", ids, output=5)
        loop.drain()
        expect(loop, f"{index}", ids, 5)
    assert loop.scheduler.counters.prefix_hits >= 29 * 8  # the shared head is never evicted

"""Two steps in flight: what is fed, what waits, what is dropped, and when blocks come back."""

import numpy as np
import pytest
from support.toy_device import ToyDevice, toy_greedy
from support.toy_llm import toy_llm
from support.toy_loop import BLOCK, ToyLoop

from ropeway.compiler.errors import RunError
from ropeway.runtime.sampling.params import SamplingParams

VOCAB = 97


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()


def loop_of(**fields: object) -> ToyLoop:
    return ToyLoop(depth=2, **fields)  # type: ignore[arg-type]


def test_the_second_step_is_fed_by_the_first() -> None:
    loop = loop_of()
    loop.add("a", prompt(5), output=3)
    loop.add("b", prompt(7, 1), output=9)
    first, second = loop.plan_step(), loop.plan_step()
    assert first is not None and second is not None
    assert [(c.start, c.count, c.feed) for c in first.chunks] == [(0, 5, -1), (0, 7, -1)]
    assert [(c.start, c.count, c.feed) for c in second.chunks] == [(5, 1, 0), (7, 1, 1)]
    assert second.bucket.kind == "decode"
    feed = loop.flying[-1][2]
    assert feed is not None and feed.tolist() == [0, 1]
    loop.drain()
    assert loop.tokens["a", 0] == toy_greedy(prompt(5), 3, VOCAB)
    assert loop.tokens["b", 0] == toy_greedy(prompt(7, 1), 9, VOCAB)


@pytest.mark.parametrize("output", [1, 2, 5])
def test_no_step_is_wasted_where_the_end_is_foreseen(output: int) -> None:
    steps = []
    for depth in (1, 2):
        loop = ToyLoop(depth=depth)
        loop.add("a", prompt(6), output=output)
        steps.append(loop.drain())
    assert steps == [output, output]


def test_chunks_of_a_prompt_follow_each_other_without_a_commit() -> None:
    loop = loop_of(chunk=4)
    loop.add("a", prompt(10), output=4)
    plans = [loop.plan_step(), loop.plan_step()]
    assert [(c.start, c.count) for p in plans if p for c in p.chunks] == [(0, 4), (4, 4)]
    loop.finish_step()
    plan = loop.plan_step()
    assert plan is not None
    assert [(c.start, c.count, c.samples) for c in plan.chunks] == [(8, 2, 1)]
    loop.drain()
    assert loop.tokens["a", 0] == toy_greedy(prompt(10), 4, VOCAB)


def test_a_stop_in_the_first_step_drops_the_row_of_the_second() -> None:
    ids = prompt(2 * BLOCK)  # the second step's token goes to a block of its own
    answer = toy_greedy(ids, 4, VOCAB)
    loop = loop_of()
    loop.add("a", ids, output=8, stop_ids={answer[0]: True})
    loop.add("b", prompt(3), output=8)
    first, second = loop.plan_step(), loop.plan_step()
    assert first is not None and second is not None and len(second.chunks) == 2
    [stopped] = [c.seq for c in second.chunks if c.seq.request.request_id == "a"]
    loop.finish_step()
    assert loop.ends["a", 0] == ["stop"] and not loop.scheduler.sequences("a")
    assert not stopped.open and len(stopped.blocks) == 3  # the second step still writes one
    third = loop.plan_step()
    assert third is not None
    assert [c.seq.request.request_id for c in third.chunks] == ["b"]
    loop.finish_step()
    assert stopped.blocks == []
    loop.drain()
    assert loop.tokens["a", 0] == answer[:1]
    assert loop.tokens["b", 0] == toy_greedy(prompt(3), 8, VOCAB)
    assert loop.pool.available == loop.pool.capacity


def test_what_a_dropped_row_wrote_is_not_published() -> None:
    ids = prompt(2 * BLOCK - 1)  # the row after the first token would fill the second block
    answer = toy_greedy(ids, 2, VOCAB)
    loop = loop_of()
    loop.add("a", ids, output=8, stop_ids={answer[0]: True})
    loop.drain()
    assert loop.pool.cached == 1
    loop.add("again", [*ids, answer[0], 3], output=4)
    loop.drain()
    assert loop.cached["again"] == BLOCK
    assert loop.tokens["again", 0] == toy_greedy([*ids, answer[0], 3], 4, VOCAB)


@pytest.mark.parametrize("position", [0, 5, 8])
def test_a_failed_draw_ends_its_request_alone(position: int) -> None:
    loop = loop_of(blocks=9)
    loop.sick = ("sick", position)
    loop.add("sick", prompt(5), output=9)
    loop.add("well", prompt(6), output=9)
    loop.drain()
    assert loop.ends["sick", 0] == ["error"]
    assert (
        loop.tokens.get(("sick", 0), []) == toy_greedy(prompt(5), 9, VOCAB)[: max(0, position - 4)]
    )
    assert loop.tokens["well", 0] == toy_greedy(prompt(6), 9, VOCAB)
    # The row that it fed was kept nowhere.
    kept = [inputs.slots[0].tolist().count(-1) for _, inputs in loop.device.steps]
    assert sum(kept) == 1
    assert loop.pool.available == loop.pool.capacity


def test_a_fork_waits_for_its_draws() -> None:
    loop = loop_of()
    loop.add("n", prompt(5), output=4, choices=3)
    loop.add("other", prompt(4), output=6)
    first, second = loop.plan_step(), loop.plan_step()
    assert first is not None and second is not None
    assert [c.samples for c in first.chunks] == [3, 1]
    assert [c.seq.request.request_id for c in second.chunks] == ["other"]
    assert [c.feed for c in second.chunks] == [3]  # after the three draws of the fork
    loop.drain()
    assert loop.tokens["other", 0] == toy_greedy(prompt(4), 6, VOCAB)
    assert loop.ends == {("n", c): ["length"] for c in range(3)} | {("other", 0): ["length"]}


def test_an_urgent_request_gets_its_blocks_after_one_commit() -> None:
    loop = loop_of(blocks=6, seqs=2)  # five blocks
    loop.add("slow", prompt(14), output=6)
    loop.run_step()
    loop.run_step()
    assert len(loop.flying) == 1
    loop.add("urgent", prompt(9), output=2, priority=-1)
    assert loop.plan_step() is None  # the slow one pauses
    loop.finish_step()
    plan = loop.plan_step()
    assert plan is not None and [c.seq.request.request_id for c in plan.chunks] == ["urgent"]
    loop.drain()
    assert loop.tokens["urgent", 0] == toy_greedy(prompt(9), 2, VOCAB)
    assert loop.tokens["slow", 0] == toy_greedy(prompt(14), 6, VOCAB)


def test_a_sequence_without_blocks_waits_for_those_below_it_to_land() -> None:
    loop = loop_of(blocks=5, caching=False)  # four blocks of four tokens
    loop.add("first", prompt(7, 1), output=6)
    loop.add("second", prompt(6, 2), output=3)
    plans = [loop.plan_step(), loop.plan_step()]
    assert all(p is not None and len(p.chunks) == 2 for p in plans)
    loop.finish_step()
    # "first" needs a third block for its ninth token, and "second" is in flight with its two.
    assert loop.plan_step() is None and loop.scheduler.counters.preemptions == 0
    loop.finish_step()
    loop.drain()
    assert loop.tokens["first", 0] == toy_greedy(prompt(7, 1), 6, VOCAB)
    assert loop.tokens["second", 0] == toy_greedy(prompt(6, 2), 3, VOCAB)


def test_steps_are_committed_in_their_order() -> None:
    loop = loop_of()
    loop.add("a", prompt(5), output=3)
    first, second = loop.plan_step(), loop.plan_step()
    assert first is not None and second is not None
    with pytest.raises(RunError, match="step 2 isn't the oldest"):
        loop.scheduler.commit(second, [1])
    loop.drain()
    with pytest.raises(RunError, match="step 1 isn't the oldest"):
        loop.scheduler.commit(first, [1])


@pytest.mark.parametrize("planned", [1, 2])
def test_abandoned_steps_leave_the_requests_to_start_over(planned: int) -> None:
    loop = loop_of()
    loop.add("a", prompt(9), output=5)
    loop.add("b", prompt(6), output=5)
    loop.run_step()
    loop.finish_planned()
    for _ in range(planned):
        assert loop.plan_step() is not None
    loop.scheduler.abort("b")
    loop.fail_step()
    assert loop.pool.available == loop.pool.capacity
    loop.drain()
    assert loop.tokens["a", 0] == toy_greedy(prompt(9), 5, VOCAB)


# -- through the engine ---------------------------------------------------------------------


def test_the_engine_keeps_two_steps_queued_and_reports_each_when_it_is_done() -> None:
    llm = toy_llm(overlap=True)
    core = llm._engine.core
    queue = core._queue
    stream = llm.stream(prompt(5), SamplingParams(temperature=0, max_tokens=6))
    seen = []
    for delta in stream:
        seen += delta.token_ids
        # Tokens so far = steps run so far: no news is held back; the next step is queued.
        assert len(llm._engine.device.steps) == len(seen)
        assert len(queue.waiting) == (1 if len(seen) < 6 else 0)
    assert seen == toy_greedy(prompt(5), 6, VOCAB)
    assert queue.most == 2


def test_a_stop_string_in_mid_flight_ends_the_text_there() -> None:
    llm = toy_llm(overlap=True)
    answer = toy_greedy(prompt(5), 6, VOCAB)
    stop = answer[2]
    [output] = llm.generate(
        prompt(5), SamplingParams(temperature=0, max_tokens=6, stop_token_ids=[stop])
    )
    assert output.outputs[0].token_ids == answer[: answer.index(stop) + 1]
    assert output.outputs[0].finish_reason == "stop"
    stats = llm.stats()
    assert stats.blocks_used == 0 and stats.running == 0
    assert not llm._engine.core.has_work


def test_a_failure_of_the_first_of_two_steps_ends_both() -> None:
    device = ToyDevice()
    llm = toy_llm(device=device, overlap=True)
    stream = llm.stream(prompt(5), SamplingParams(temperature=0, max_tokens=9))
    next(stream)
    steps = len(device.steps)
    device.fail_next = True
    with pytest.raises(RunError, match="planted"):
        next(stream)
    assert len(device.steps) == steps and llm.stats().blocks_used == 0
    [output] = llm.generate(prompt(5), SamplingParams(temperature=0, max_tokens=6))
    assert output.outputs[0].token_ids == toy_greedy(prompt(5), 6, VOCAB)


def test_closing_with_a_step_queued_runs_it_no_more() -> None:
    device = ToyDevice()
    llm = toy_llm(device=device, overlap=True)
    stream = llm.stream(prompt(5), SamplingParams(temperature=0, max_tokens=9))
    next(stream)
    steps = len(device.steps)
    llm.close()
    assert llm.stats().blocks_used == 0 and len(device.steps) == steps

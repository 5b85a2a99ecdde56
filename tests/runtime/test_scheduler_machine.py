"""Random lives of the scheduler: every block accounted for, one end each, the right tokens."""

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)
from support.toy_device import toy_greedy, toy_logits
from support.toy_loop import ToyLoop

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import RequestError

VOCAB = 97
STEM = np.random.default_rng(3).integers(0, VOCAB, 24).tolist()
STOP = 5
DEPTH = 2  # steps in flight
PROMPTS = st.builds(
    lambda shared, own: STEM[:shared] + own or STEM[:1],
    st.integers(0, 20),
    st.lists(st.integers(0, VOCAB - 1), max_size=4),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Prompts share prefixes of one stem; the pool is tiny, so preemption is common."""

    names = Bundle("names")

    @initialize(
        shape=st.fixed_dictionaries(
            {
                "blocks": st.integers(5, 16),
                "seqs": st.integers(1, 4),
                "budget": st.integers(1, 16),
                "chunk": st.one_of(st.none(), st.integers(1, 6)),
                "caching": st.booleans(),
            }
        ),
        rows=st.integers(2, 6),
        weak=st.booleans(),
    )
    def start(self, shape: dict[str, Any], rows: int, weak: bool) -> None:
        buckets = [Bucket("decode", n, n, n) for n in (1, 3)] + [Bucket("mixed", 16, 5, rows)]
        kwargs = {"digest": lambda data: bytes([sum(data) % 5])} if weak else {}
        self.loop = ToyLoop(max_model_len=40, buckets=buckets, **shape, **kwargs)
        self.requests: dict[str, tuple[list[int], int, int, bool]] = {}
        self.aborted: set[str] = set()
        self.ended_choices: set[tuple[str, int]] = set()

    @rule(
        target=names,
        ids=PROMPTS,
        output=st.integers(0, 9),
        fields=st.fixed_dictionaries(
            {
                "choices": st.sampled_from([1, 1, 1, 2, 4]),
                "priority": st.sampled_from([0, 0, 0, 1, -1]),
                "salt": st.sampled_from(["", "", "b"]),
                "wants_prompt_logprobs": st.booleans(),
            }
        ),
    )
    def add(self, ids: list[int], output: int, fields: dict[str, Any]) -> str:
        name = f"r{self.loop.arrivals}"
        if output == 0:
            fields["choices"] = 1
        try:
            self.loop.add(name, ids, output, stop_ids={STOP: True}, **fields)
        except RequestError as error:
            needed = max(len(ids), len(ids) + output - 1)
            assert error.field == "max_tokens"
            assert needed > self.loop.scheduler.capacity_tokens
        else:
            scored = fields["wants_prompt_logprobs"]
            self.requests[name] = (ids, output, fields["choices"], scored)
        return name

    @precondition(lambda self: len(self.loop.flying) < DEPTH)
    @rule()
    def plan_step(self) -> None:
        if self.loop.plan_step() is None and not self.loop.flying:
            assert self.loop.scheduler.unfinished == 0

    @precondition(lambda self: self.loop.flying)
    @rule()
    def finish_step(self) -> None:
        self.loop.finish_step()

    @rule(count=st.integers(1, 8), depth=st.integers(1, DEPTH))
    def run_steps(self, count: int, depth: int) -> None:
        self.loop.depth = depth
        for _ in range(count):
            self.loop.run_step()

    @precondition(lambda self: self.loop.flying)
    @rule()
    def fail_step(self) -> None:
        self.loop.fail_step()

    @rule(name=consumes(names))
    def abort(self, name: str) -> None:
        live = bool(self.loop.scheduler.sequences(name))
        assert self.loop.scheduler.abort(name) == live
        if live:
            self.aborted.add(name)

    @rule(name=names, index=st.integers(0, 3))
    def end_choice(self, name: str, index: int) -> None:
        sequences = self.loop.scheduler.sequences(name)
        if index < len(sequences) and sequences[index].output_tokens:
            if sequences[index].open:
                self.ended_choices.add((name, sequences[index].choice))
            self.loop.scheduler.abort_choice(sequences[index])

    @invariant()
    def blocks_add_up(self) -> None:
        if hasattr(self, "loop"):
            self.loop.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.loop.drain()
        assert self.loop.pool.available == self.loop.pool.capacity
        for name, (ids, output, choices, scored) in self.requests.items():
            self._check_request(name, ids, output, choices)
            if scored and name not in self.aborted:
                rows = self.loop.scored.get(name, [])
                assert [p for p, _ in rows] == list(range(len(ids) - 1))
                for position, value in rows:
                    assert value == float(toy_logits(ids[: position + 1], VOCAB).sum())

    def _check_request(self, name: str, ids: list[int], output: int, choices: int) -> None:
        firsts = np.argsort(-toy_logits(ids, VOCAB), kind="stable")[:choices].tolist()
        for choice in range(choices):
            tokens = self.loop.tokens.get((name, choice), [])
            ends = self.loop.ends.get((name, choice), [])
            want: list[int] = []
            if output:
                want = [firsts[choice]]
                if want[0] != STOP:
                    rest = [*ids, *want]
                    want += toy_greedy(rest, output - 1, VOCAB, (STOP,)) if output > 1 else []
            if name in self.aborted or (name, choice) in self.ended_choices:
                assert tokens == want[: len(tokens)] and len(ends) <= 1
            else:
                assert tokens == want
                assert ends == ["stop" if want and want[-1] == STOP else "length"]


SchedulerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedulerMachine = SchedulerMachine.TestCase

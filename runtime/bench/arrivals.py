"""Prompts that arrive while others decode: how long does a request wait for its next token?

A step holds at most the budget of tokens, decodes first, so nobody should wait longer than a step
of the budget's prompt tokens takes; that step is timed in the same run.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ropeway.runtime.bench.watched import greedy_request
from ropeway.runtime.bench.workload import TokenIds
from ropeway.runtime.engine.core import EngineCore

_REQUESTS = 64
_FIRST = 16  # requests that are there from the start
_GROUPS = (1, 4, 1, 8, 2)  # sizes of the groups in which the others come, over and over
_EVERY = 6  # steps between two groups
_LENGTHS = ((32, 128), (128, 512), (512, 1024))  # prompts: half of them, a third, a sixth
_KINDS = (0, 0, 0, 1, 1, 2)
_NEW = (24, 56)
_BUDGET_STEPS = 5


@dataclass(frozen=True)
class Arrival:
    """A request of this prompt, for `new` tokens, that comes before step `step`."""

    step: int
    prompt: list[int]
    new: int


class Waits(msgspec.Struct, frozen=True):
    """Milliseconds between tokens of a request: number of waits, median, 99th percentile, most."""

    count: int
    median: float
    p99: float
    max: float

    @property
    def figures(self) -> list[float]:
        """[median, 99th percentile, most]."""
        return [self.median, self.p99, self.max]

    @staticmethod
    def of(milliseconds: Sequence[float]) -> "Waits":
        """All 0 when there was none."""
        if not milliseconds:
            return Waits(0, 0.0, 0.0, 0.0)
        found = np.percentile(milliseconds, (50, 99, 100)).round(2).tolist()
        return Waits(len(milliseconds), *found)


class ArrivalFigures(msgspec.Struct, frozen=True):
    """One run. `decode`: waits for steps without prompt tokens; `mixed`: with some."""

    budget_tokens: int
    budget_step_ms: float
    decode: Waits
    mixed: Waits
    output_tok_s: float

    @property
    def over_budget(self) -> float:
        """The longest wait of all / the time that the budget allows."""
        longest = max(self.decode.max, self.mixed.max)
        return longest / self.budget_step_ms if self.budget_step_ms else 0.0


def make_arrivals(vocab_size: int, longest: int) -> list[Arrival]:
    """The requests, always the same; prompts are cut so that no sequence exceeds `longest`."""
    ids = TokenIds(vocab_size)
    steps = [0] * _FIRST
    turn = 0
    while len(steps) < _REQUESTS:
        turn += 1
        steps += [turn * _EVERY] * _GROUPS[turn % len(_GROUPS)]
    arrivals = []
    for step in steps[:_REQUESTS]:
        low, high = _LENGTHS[_KINDS[ids.below(len(_KINDS))]]
        new = min(_NEW[0] + ids.below(_NEW[1] - _NEW[0]), longest // 2)
        prompt = ids.take(min(low + ids.below(high - low), longest - new))
        arrivals.append(Arrival(step, prompt, new))
    return arrivals


def measure_arrivals(core: EngineCore, arrivals: Sequence[Arrival]) -> ArrivalFigures:
    """Runs the requests on an idle core, and the step that the budget allows before and after."""
    budget = [_budget_step(core) for _ in range(_BUDGET_STEPS + 1)][1:]
    began = time.perf_counter()
    decode, mixed = _run(core, arrivals)
    took = time.perf_counter() - began
    budget += [_budget_step(core) for _ in range(_BUDGET_STEPS)]
    return ArrivalFigures(
        budget_tokens=core.scheduler.limits.max_tokens,
        budget_step_ms=round(1e3 * statistics.median(budget), 2),
        decode=Waits.of(decode),
        mixed=Waits.of(mixed),
        output_tok_s=round(sum(one.new for one in arrivals) / took, 1),
    )


def _run(core: EngineCore, arrivals: Sequence[Arrival]) -> tuple[list[float], list[float]]:
    """Waits in milliseconds, of steps without and with prompt tokens."""
    coming = sorted(arrivals, key=lambda one: one.step)
    last: dict[str, float] = {}  # when a request's latest token came
    decode: list[float] = []
    mixed: list[float] = []
    step, started = 0, 0
    computed = core.stats().computed_tokens
    while started < len(coming) or core.has_work:
        while started < len(coming) and (coming[started].step <= step or not core.has_work):
            one = coming[started]
            core.add(greedy_request(f"arrival-{started}", one.prompt, one.new))
            started += 1
        updates = core.step()
        now = time.perf_counter()
        before, computed = computed, core.stats().computed_tokens
        waits = mixed if computed - before > len(last) else decode
        for update in updates:
            if update.token is not None:
                if update.request_id in last:
                    waits.append(1e3 * (now - last[update.request_id]))
                last[update.request_id] = now
            if update.finish_reason:
                last.pop(update.request_id, None)
        step += 1
    return decode, mixed


def _budget_step(core: EngineCore) -> float:
    """Seconds of a step that holds prompts of the budget's tokens, nothing else."""
    limits = core.scheduler.limits
    ids = TokenIds(core.vocab_size)
    left, number = limits.max_tokens, 0
    while left > 0 and number < limits.max_seqs:
        length = min(left, limits.max_chunk, core.scheduler.max_model_len - 1)
        core.add(greedy_request(f"budget-{number}", ids.take(length), 1))
        left -= length
        number += 1
    began = time.perf_counter()
    core.step()
    took = time.perf_counter() - began
    while core.has_work:
        core.step()
    return took

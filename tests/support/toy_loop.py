"""The scheduler driven by hand over the toy device: no sampler, no text, each phase a call."""

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ropeway.compiler.config import Bucket
from ropeway.runtime.devices.base import Int32Array, StepInputs
from ropeway.runtime.engine.block_pool import BlockPool
from ropeway.runtime.engine.block_tables import BlockTables
from ropeway.runtime.engine.limits import step_limits
from ropeway.runtime.engine.plan import Progress, StepPlan
from ropeway.runtime.engine.prefix import Digest, blake2b
from ropeway.runtime.engine.request import Request
from ropeway.runtime.engine.scheduler import Scheduler
from ropeway.runtime.engine.step_inputs import build_feed, build_step_inputs
from ropeway.runtime.step_queue import fed_inputs
from support.toy_device import ToyDevice

BLOCK = 4


class ToyLoop:
    """Collects each choice's tokens and end; a choice c > 0 takes the c-th best first token."""

    usual_depth: ClassVar[int] = 1  # steps in flight

    def __init__(
        self,
        *,
        blocks: int = 33,
        max_model_len: int = 64,
        caching: bool = True,
        seqs: int = 8,
        budget: int | None = None,
        chunk: int | None = None,
        buckets: Sequence[Bucket] | None = None,
        digest: Digest = blake2b,
        depth: int | None = None,
    ) -> None:
        self.device = ToyDevice(block_size=BLOCK, buckets=buckets)
        self.device.allocate(blocks)
        limits = step_limits(
            self.device.buckets,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_prefill_chunk=chunk,
        )
        self.pool = BlockPool(blocks, caching=caching)
        tables = BlockTables(limits.max_seqs, max_model_len, BLOCK)
        self.scheduler = Scheduler(self.pool, tables, limits, max_model_len, digest=digest)
        self.tables = tables
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], list[str]] = {}
        self.scored: dict[str, list[tuple[int, float]]] = {}
        self.cached: dict[str, int] = {}
        self.arrivals = 0
        self.depth = depth or self.usual_depth
        self.flying: deque[
            tuple[StepPlan, StepInputs, Int32Array | None, list[tuple[int, int]]]
        ] = deque()
        self.sick: tuple[str, int] | None = None  # (request, position) whose draw fails
        self._drawn: list[int] = []

    def add(self, name: str, prompt: Sequence[int], output: int = 4, **fields: object) -> None:
        """Queue a request of `output` tokens."""
        self.arrivals += 1
        request = Request(
            request_id=name,
            prompt=np.asarray(prompt, np.int32),
            total_tokens=len(prompt) + output,
            arrival=self.arrivals,
            **fields,
        )
        self.scheduler.add(request)

    def plan_step(self) -> StepPlan | None:
        """Plan a step; what the device will read is fixed here, whatever is committed meanwhile."""
        plan = self.scheduler.plan()
        self.scheduler.check()
        if plan is None:
            return None
        limits = self.scheduler.limits
        assert plan.tokens <= limits.max_tokens and len(plan.chunks) <= limits.max_seqs
        assert plan.rows <= limits.max_rows
        draws = range(self.flying[-1][0].samples) if self.flying else ()
        feed = build_feed(plan, draws)
        self.flying.append((plan, build_step_inputs(plan, self.tables), feed, list(plan.copies)))
        return plan

    def run_step(self) -> StepPlan | None:
        """Keep `depth` steps planned, and finish the oldest; None when there is nothing to do."""
        while len(self.flying) < self.depth and self.plan_step() is not None:
            pass
        if not self.flying:
            return None
        plan = self.flying[0][0]
        self.finish_step()
        return plan

    def finish_step(self) -> list[Progress]:
        """Replay the oldest step, take the best tokens, commit, verify the pool."""
        plan, inputs, feed, copies = self.flying.popleft()
        self.device.copy_blocks(copies)
        if feed is not None:
            inputs = fed_inputs(inputs, feed, np.array(self._drawn, np.int32))
        logits = self.device.submit(plan.bucket, inputs).logits
        self._drawn = self._choose(plan, logits)
        progress = self.scheduler.commit(plan, self._drawn)
        self.scheduler.check()
        for item in progress:
            key = (item.seq.request.request_id, item.seq.choice)
            if item.token is not None:
                self.tokens.setdefault(key, []).append(item.token)
            if item.finish_reason:
                self.ends.setdefault(key, []).append(item.finish_reason)
            self.cached[key[0]] = item.seq.cached_tokens
        return progress

    def finish_planned(self) -> None:
        """Finish what was planned before now."""
        while self.flying:
            self.finish_step()

    def fail_step(self) -> None:
        """The device fails: nothing of what is in flight is computed."""
        self.flying.clear()
        self.scheduler.abandon()
        self.scheduler.check()

    def _choose(self, plan: StepPlan, logits: np.ndarray) -> list[int]:
        tokens: list[int] = []
        row = 0
        for chunk in plan.chunks:
            scored = self.scored.setdefault(chunk.seq.request.request_id, [])
            for position in range(*chunk.scored):
                scored.append((position, float(logits[row].sum())))
                row += 1
            if chunk.samples and self.sick == (chunk.seq.request.request_id, chunk.start):
                tokens.extend([-1] * chunk.samples)
                row += 1
            elif chunk.samples:
                tokens.extend(np.argsort(-logits[row], kind="stable")[: chunk.samples].tolist())
                row += 1
        assert row == len(logits)
        return tokens

    def drain(self, limit: int = 2000) -> int:
        """Step until nothing is left; returns the number of steps, fails after `limit`."""
        for count in range(limit):
            if self.run_step() is None:
                assert self.scheduler.unfinished == 0 and self.scheduler.waiting == 0
                return count
        raise AssertionError(f"still busy after {limit} steps")

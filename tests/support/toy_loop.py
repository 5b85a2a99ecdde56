"""The scheduler driven by hand over the toy device: no sampler, no text, each phase a call."""

from collections.abc import Sequence

import numpy as np

from ropeway.compiler.config import Bucket
from ropeway.runtime.engine.block_pool import BlockPool
from ropeway.runtime.engine.block_tables import BlockTables
from ropeway.runtime.engine.limits import step_limits
from ropeway.runtime.engine.plan import Progress, StepPlan
from ropeway.runtime.engine.prefix import Digest, blake2b
from ropeway.runtime.engine.request import Request
from ropeway.runtime.engine.scheduler import Scheduler
from ropeway.runtime.engine.step_inputs import build_step_inputs
from support.toy_device import ToyDevice

BLOCK = 4


class ToyLoop:
    """Collects each choice's tokens and end; a choice c > 0 takes the c-th best first token."""

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

    def run_step(self) -> StepPlan | None:
        """One whole step; None when there is nothing to do."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.finish_step(plan)
        return plan

    def finish_step(self, plan: StepPlan) -> list[Progress]:
        """Replay, take the best tokens, commit, verify the pool."""
        limits = self.scheduler.limits
        assert plan.tokens <= limits.max_tokens and len(plan.chunks) <= limits.max_seqs
        assert plan.rows <= limits.max_rows
        self.scheduler.check([plan])
        self.device.copy_blocks(plan.copies)
        assert plan.bucket is not None
        logits = self.device.submit(plan.bucket, build_step_inputs(plan, self.tables)).logits
        progress = self.scheduler.commit(plan, self._choose(plan, logits))
        self.scheduler.check()
        for item in progress:
            key = (item.seq.request.request_id, item.seq.choice)
            if item.token is not None:
                self.tokens.setdefault(key, []).append(item.token)
            if item.finish_reason:
                self.ends.setdefault(key, []).append(item.finish_reason)
            self.cached[key[0]] = item.seq.cached_tokens
        return progress

    def _choose(self, plan: StepPlan, logits: np.ndarray) -> list[int]:
        tokens: list[int] = []
        row = 0
        for chunk in plan.chunks:
            scored = self.scored.setdefault(chunk.seq.request.request_id, [])
            for position in range(*chunk.scored):
                scored.append((position, float(logits[row].sum())))
                row += 1
            if chunk.samples:
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

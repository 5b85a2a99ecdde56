"""The engine core: plan, queue, commit, one step a call.

Contract: only token ids, no text. The core is driven by one thread at a time. A request is checked
whole when it is added; after that nothing it says can fail the step of another. What is slow about
that, compiling the form of its text, any thread may do before (`compile_grammar`). When the device
fails, every request ends with an error and all blocks come back, before the error is raised.

Over a device's own queue two steps are in flight: while one runs the next is planned and queued,
and the news of the one before is on its way to whoever waits. A step's news comes as soon as it is
done. While a step draws a token that a grammar must see before it can tell what may follow, none is
queued behind it.
"""

import time
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from ropeway.compiler.errors import RunError
from ropeway.runtime.devices.base import Device, StepJob, StepQueue
from ropeway.runtime.engine.admission import Capacity, check_params, check_request
from ropeway.runtime.engine.block_pool import BlockPool
from ropeway.runtime.engine.block_tables import BlockTables
from ropeway.runtime.engine.limits import StepLimits
from ropeway.runtime.engine.messages import EngineStats, FinishReason, GenerationRequest, Update
from ropeway.runtime.engine.plan import Progress, StepPlan
from ropeway.runtime.engine.request import Request
from ropeway.runtime.engine.sample_rows import RequestSampling, SampleRows, token_logprobs
from ropeway.runtime.engine.scheduler import Scheduler
from ropeway.runtime.engine.step_inputs import build_feed, build_step_inputs
from ropeway.runtime.sampling.batch import SampleResult
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.runtime.step_queue import InlineQueue
from ropeway.runtime.structured.compiler import GrammarCompiler
from ropeway.runtime.structured.grammar import Grammar


class _Flight(msgspec.Struct, frozen=True):
    """A step that was queued; `drawn` are those of its sampled rows that are draws. Only its
    commit says what may follow those that are `constrained`."""

    plan: StepPlan
    ticket: int
    drawn: list[int]
    constrained: bool


class EngineCore:
    """Continuous batching over one device."""

    def __init__(
        self,
        device: Device,
        limits: StepLimits,
        *,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int,
        eos_ids: Sequence[int] = (),
        enable_prefix_caching: bool = True,
        seed: int = 0,
        queue: StepQueue | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """The device must have been loaded; `num_blocks` KV blocks (null block included) are
        allocated here. With a `queue` of the device's two steps are in flight, else one. Without
        `grammars` no request's text can be constrained."""
        layout = device.cache_layout
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        self._grammars = grammars or GrammarCompiler(None, vocab_size)
        self._queue: StepQueue = queue or InlineQueue(device)
        self._depth = 1 if queue is None else 2
        self._flying: deque[_Flight] = deque()
        self._seed = seed
        self._arrivals = 0
        self._tables = BlockTables(limits.max_seqs, max_model_len, layout.block_size, layout.groups)
        pool = BlockPool(num_blocks, caching=enable_prefix_caching)
        self.scheduler = Scheduler(pool, self._tables, limits, max_model_len)
        self.capacity = Capacity(
            vocab_size, max_model_len, self.scheduler.capacity_tokens, self.eos_ids
        )
        self._rows = SampleRows(limits.max_seqs)
        self._sampling: dict[str, RequestSampling] = {}
        self._pending: list[Update] = []
        self._native = 0.0
        self._host = 0.0
        self._prompt_tokens = 0
        self._output_tokens = 0
        device.allocate(num_blocks)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to report."""
        return self.scheduler.unfinished > 0 or bool(self._pending) or bool(self._flying)

    def compile_grammar(self, params: SamplingParams) -> Grammar | None:
        """The grammar of the params' structured_outputs; None without. Slow (a millisecond, a
        second for the largest) unless it was compiled lately; any thread may call it at any time.

        Raises RequestError, naming the field, when it can't be compiled or is too large.
        """
        check_params(params)
        if params.structured_outputs is None:
            return None
        return self._grammars.compile(params.structured_outputs)

    def add(self, request: GenerationRequest, grammar: Grammar | None = None) -> None:
        """Queue a request, with the grammar of its params if they have one. RequestError, naming
        the field, when it can't be served."""
        queued, sampling = self._accept(request, grammar)
        self.scheduler.add(queued)
        self._sampling[request.request_id] = sampling
        self._arrivals += 1
        self._prompt_tokens += len(request.prompt)

    def check(self, request: GenerationRequest, grammar: Grammar | None = None) -> None:
        """Raises what `add` would raise; queues nothing."""
        queued, _ = self._accept(request, grammar)
        self.scheduler.check_request(queued)

    def _accept(
        self, request: GenerationRequest, grammar: Grammar | None
    ) -> tuple[Request, RequestSampling]:
        total_tokens = check_request(request, self.capacity)
        params = request.params
        stop_ids = {} if params.ignore_eos else dict.fromkeys(self.eos_ids, False)
        stop_ids.update(dict.fromkeys(params.stop_ids, True))
        queued = Request(
            request_id=request.request_id,
            prompt=np.array(request.prompt, np.int32),
            total_tokens=total_tokens,
            stop_ids=stop_ids,
            choices=params.n,
            priority=request.priority,
            salt=request.salt,
            wants_prompt_logprobs=params.prompt_logprobs is not None,
            arrival=self._arrivals,
        )
        sampling = RequestSampling.of(
            request,
            vocab_size=self.vocab_size,
            engine_seed=self._seed,
            arrival=self._arrivals,
            eos_ids=self.eos_ids,
            grammar=grammar,
        )
        return queued, sampling

    def abort(self, request_id: str) -> bool:
        """End a request: its open choices report `abort` with the next step. False when it isn't
        live."""
        return self._end(request_id, "abort", None)

    def abort_all(self) -> None:
        """End every request, as `abort` does."""
        for request_id in list(self._sampling):
            self.abort(request_id)

    def finish_choice(self, request_id: str, choice: int) -> None:
        """End one choice whose text is complete (a stop string was found); it reports nothing
        more. Nothing happens when it has ended already."""
        for seq in self.scheduler.sequences(request_id):
            if seq.choice == choice:
                self.scheduler.abort_choice(seq)
                break
        if not self.scheduler.sequences(request_id):
            self._sampling.pop(request_id, None)

    def step(self) -> list[Update]:
        """Finish one step; the news of every choice that has some. Empty when idle.

        Raises RunError when the device fails; all requests have then ended, which the next `step`
        reports.
        """
        began, native = time.perf_counter(), self._native
        updates, self._pending = self._pending, []
        try:
            while self._may_launch() and self._launch():
                pass
            stuck = not self._flying and not updates and self.scheduler.unfinished > 0
            if self._flying:
                updates += self._land()
        except BaseException as error:
            self._pending = updates
            self._fail(f"{type(error).__name__}: {error}")
            raise
        if stuck:
            raise RunError(
                f"scheduler: {self.scheduler.unfinished} requests wait but none can run; please "
                f"report this with llm.stats()"
            )
        self._host += time.perf_counter() - began - (self._native - native)
        return updates

    def stats(self) -> EngineStats:
        """Totals and state now. Steps that nobody waits for any more are finished first."""
        if not self.scheduler.unfinished:
            self.settle()
        scheduler, pool = self.scheduler, self.scheduler.pool
        counters = scheduler.counters
        return EngineStats(
            steps=counters.steps,
            native_seconds=self._native,
            host_seconds=self._host,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            computed_tokens=counters.tokens,
            preemptions=counters.preemptions,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            blocks_total=pool.capacity,
            blocks_used=pool.capacity - pool.available,
            blocks_free=pool.available,
            blocks_cached=pool.cached,
            block_size=self._tables.block_size,
        )

    def settle(self) -> None:
        """Finish the steps in flight; their news comes with the next `step`."""
        while self._flying:
            try:
                self._pending += self._land()
            except BaseException as error:
                self._fail(f"{type(error).__name__}: {error}")
                raise

    def count_host(self, seconds: float) -> None:
        """Add work done for steps outside the core (text), so that the totals are whole."""
        self._host += seconds

    # -- one step ---------------------------------------------------------------------------

    def _may_launch(self) -> bool:
        # Leaving a constrained choice out until it is committed would let it advance in every
        # second step only, and each step pays for all weights.
        flying = self._flying
        return len(flying) < self._depth and not (flying and flying[-1].constrained)

    def _launch(self) -> bool:
        """Plan a step and queue it; False when there is nothing to run."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        batch, drawn = self._rows.build(plan, self._sampling) if plan.rows else (None, [])
        peak_only = None if batch is None else batch.peak_only(plan.rows)
        job = StepJob(
            bucket=plan.bucket,
            inputs=build_step_inputs(plan, self._tables, peak_only),
            batch=batch,
            copies=plan.copies,
            feed=build_feed(plan, self._flying[-1].drawn) if self._flying else None,
        )
        began = time.perf_counter()
        ticket = self._queue.enqueue(job)
        self._native += time.perf_counter() - began
        constrained = any(
            chunk.samples and self._sampling[chunk.seq.request.request_id].constrained
            for chunk in plan.chunks
        )
        self._flying.append(_Flight(plan, ticket, drawn, constrained))
        return True

    def _land(self) -> list[Update]:
        """Wait for the oldest step in flight and commit it."""
        flight = self._flying[0]
        began = time.perf_counter()
        result = self._queue.wait(flight.ticket)
        self._native += time.perf_counter() - began
        self._flying.popleft()
        plan, drawn = flight.plan, flight.drawn
        if result is None:
            return self._updates(plan, [], None, [])
        if len(drawn) < len(result.tokens):
            self._collect_prompt(plan, result)
        tokens = result.tokens.tolist()
        return self._updates(plan, [tokens[row] for row in drawn], result, drawn)

    def _updates(
        self, plan: StepPlan, tokens: list[int], result: SampleResult | None, drawn: list[int]
    ) -> list[Update]:
        progress = self.scheduler.commit(plan, tokens)
        updates: list[Update] = []
        for item in progress:
            row = drawn[item.draw] if item.draw >= 0 else -1
            updates.append(update := self._update(item, result, row))
            if item.token is not None and item.finish_reason != "stop":
                updates.extend(self._advance(item, item.token, update))
        for item in progress:
            if item.finish_reason and not self.scheduler.sequences(item.seq.request.request_id):
                self._sampling.pop(item.seq.request.request_id, None)
        return updates

    def _collect_prompt(self, plan: StepPlan, result: SampleResult) -> None:
        at = 0
        for chunk in plan.chunks:
            first, stop = chunk.scored
            sampling = self._sampling.get(chunk.seq.request.request_id)
            if sampling is not None:
                rows = range(at, at + stop - first)
                sampling.prompt_logprobs.extend(token_logprobs(result, row) for row in rows)
            at += stop - first + chunk.samples

    def _update(self, item: Progress, result: SampleResult | None, row: int) -> Update:
        seq = item.seq
        request_id = seq.request.request_id
        sampling = self._sampling[request_id]
        params = sampling.request.params
        update = Update(
            request_id,
            seq.choice,
            item.token,
            seq.cached_tokens,
            item.finish_reason,
            item.stop_reason,
        )
        if item.token is not None:
            self._output_tokens += 1
            if params.logprobs is not None and result is not None:
                update.logprobs = token_logprobs(result, row)
        elif item.finish_reason == "error" and result is not None:
            reasons = [fault.message for fault in result.faults if fault.index == row]
            matcher = sampling.matcher(seq.choice)
            if matcher is not None and matcher.error:
                reasons.insert(0, matcher.error)
            update.stop_reason = reasons[0] if reasons else "the sampler drew no token"
        if not sampling.reported:
            sampling.reported = True
            if params.prompt_logprobs is not None:
                update.prompt_logprobs = sampling.prompt_logprobs
        return update

    def _advance(self, item: Progress, token: int, update: Update) -> list[Update]:
        """Tell the choice's matcher of its token; the choice's end when nothing can follow.

        It comes apart from the token's own `update`, since a token that ends a choice with "stop"
        is no text.
        """
        seq = item.seq
        matcher = self._sampling[seq.request.request_id].matcher(seq.choice)
        if matcher is None:
            return []
        matcher.commit(token)
        if not matcher.finished:
            return []
        error = matcher.error or None
        item.finish_reason = "error" if error else "stop"
        self.scheduler.abort_choice(seq)
        update.finish_reason = None
        end = Update(update.request_id, seq.choice, None, update.cached_tokens)
        end.finish_reason, end.stop_reason = item.finish_reason, error
        return [end]

    # -- ends -------------------------------------------------------------------------------

    def halt(self) -> None:
        """Forget the steps in flight: when this returns none runs, and their requests wait."""
        self._queue.cancel()
        self._flying.clear()
        self.scheduler.abandon()

    def _fail(self, message: str) -> None:
        self.halt()
        for request_id in list(self._sampling):
            self._end(request_id, "error", message)

    def _end(self, request_id: str, reason: FinishReason, message: str | None) -> bool:
        """End every open choice, those that aren't forked yet included."""
        sequences = self.scheduler.sequences(request_id)
        cached = max((seq.cached_tokens for seq in sequences), default=0)
        choices = [seq.choice for seq in sequences if seq.open]
        if sequences and sequences[0].forks:
            choices.extend(range(1, sequences[0].forks + 1))
        if not self.scheduler.abort(request_id):
            return False
        del self._sampling[request_id]
        self._pending.extend(
            Update(request_id, choice, None, max(cached, 0), reason, message) for choice in choices
        )
        return True

"""Which tokens run next: one token budget per step, no prefill or decode phase.

A sequence needs num_tokens - num_computed tokens. `plan` decides a step and `commit` takes its
results; with `add` and `abort` they are the only mutators, and all are deterministic given the
state, so that a recorded run replays.

Several steps may be planned before the first is committed, in the order in which they run. A
sequence then goes on as if it didn't stop: its next input is fed by the draw of the step before.
If it did stop, its row is dropped at that step's commit. What can't be foreseen (a fork, a block
that only a commit frees) waits for the commit.

Invariants: the pool can hold the longest accepted sequence alone, and a victim of preemption
always ranks below the sequence that needs its blocks; so the highest-ranked sequence advances in
every step, and nobody starves behind a finite number of earlier or more urgent ones. Only
committed, hence computed, full blocks are published. A block goes back to the pool when no step in
flight writes it any more.
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from operator import attrgetter

from ropeway.compiler.errors import RequestError, RunError
from ropeway.runtime.engine.block_pool import BlockPool
from ropeway.runtime.engine.block_tables import BlockTables
from ropeway.runtime.engine.limits import StepLimits
from ropeway.runtime.engine.plan import (
    Chunk,
    Progress,
    SchedulerCounters,
    StepPlan,
    check_running,
)
from ropeway.runtime.engine.prefix import Digest, blake2b
from ropeway.runtime.engine.prefix_walk import match_prefix, publish_blocks
from ropeway.runtime.engine.request import Choice, Key, Request, State

_key = attrgetter("key")


class Scheduler:
    """Owns every sequence's place, blocks and progress."""

    def __init__(
        self,
        pool: BlockPool,
        tables: BlockTables,
        limits: StepLimits,
        max_model_len: int,
        *,
        digest: Digest = blake2b,
    ) -> None:
        """`tables` must hold limits.max_seqs slots."""
        self.pool = pool
        self.limits = limits
        self.max_model_len = max_model_len
        self.tables = tables
        self.counters = SchedulerCounters()
        self._block_size = tables.block_size
        self._digest = digest
        self._waiting: list[tuple[Key, Choice]] = []
        self._running: list[Choice] = []
        self._slots = list(range(limits.max_seqs - 1, -1, -1))
        self._live: dict[str, list[Choice]] = {}
        self._number = 0  # of the last planned step
        self._flying: deque[StepPlan] = deque()  # planned, neither committed nor abandoned

    # -- requests ---------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence, in tokens, that the pool can hold when it runs alone."""
        return self.pool.capacity * self._block_size

    @property
    def unfinished(self) -> int:
        """Requests that still owe their end."""
        return len(self._live)

    @property
    def running(self) -> Sequence[Choice]:
        """Sequences that hold blocks, the most important first."""
        return self._running

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot or blocks."""
        return sum(1 for _, seq in self._waiting if seq.state is State.WAITING)

    def sequences(self, request_id: str) -> Sequence[Choice]:
        """The request's choices so far (those after the first appear when its prompt is done)."""
        return self._live.get(request_id, ())

    def add(self, request: Request) -> None:
        """Queue a request. RequestError when it could never run; nothing has changed then."""
        self.check_request(request)
        seq = Choice(request)
        self._live[request.request_id] = [seq]
        heappush(self._waiting, (seq.key, seq))

    def check_request(self, request: Request) -> None:
        """Raises RequestError when the request could never run."""
        if request.request_id in self._live:
            raise RequestError("request_id", f"{request.request_id!r} is already running")
        request.check_fits(self.max_model_len, self.capacity_tokens)

    def abort(self, request_id: str) -> bool:
        """End a request now; False when it isn't live. Its blocks come back at once, or with the
        commit of the last step in flight; no more Progress is reported for it."""
        choices = self._live.pop(request_id, None)
        if choices is None:
            return False
        for seq in choices:
            self._end(seq)
        return True

    def abort_choice(self, seq: Choice) -> None:
        """End one choice (a stop string was found in its text); the others go on."""
        if seq.open:
            self._end(seq)
            self._forget(seq)

    def _end(self, seq: Choice) -> None:
        if seq.in_flight:
            seq.ended = True  # a step still writes its blocks; its commit drops the sequence
        else:
            self._drop(seq)

    # -- plan -------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Decide the next step; None when nothing can run (then nothing waits either, unless a
        step is in flight: the next plan after its commit may have something)."""
        plan = StepPlan(self._number + 1)
        index, blocked = 0, False
        while plan.tokens < self.limits.max_tokens:
            seq = self._running[index] if index < len(self._running) else None
            head = None if blocked else self._head()
            if head is not None and (seq is None or head.priority < seq.priority):
                behind = len(self._running) - index
                # Each running sequence still to come is sure of one row.
                spare = self.limits.max_rows - plan.rows - behind
                if spare > 0 and self._admit(head, plan, behind):
                    index += 1
                elif spare > 0 and self._may_yield(head):
                    break  # less urgent ones pause, so that their blocks can be taken
                else:
                    blocked = True
            elif seq is None:
                break
            elif self._waits(seq) or self._schedule(seq, plan, len(self._running) - index - 1):
                index += 1
            elif seq.state is State.RUNNING:
                break  # likewise
        if not plan.chunks:
            return None
        self._depart(plan)
        return plan

    def _depart(self, plan: StepPlan) -> None:
        """From here on the plan is in flight, and its sequences are planned beyond it."""
        self._number = plan.number
        draws = 0
        for chunk in plan.chunks:
            seq = chunk.seq
            seq.in_flight += 1
            seq.num_planned = chunk.start + chunk.count
            seq.last_step = plan.number
            if chunk.samples == 1:
                seq.num_pending += 1
                seq.feed = draws
            draws += chunk.samples
        plan.bucket = self.limits.choose(plan.tokens, len(plan.chunks), plan.rows)
        self._flying.append(plan)

    def _waits(self, seq: Choice) -> bool:
        """Whether only the commit of a step in flight says what `seq` needs next."""
        if not seq.in_flight:
            return False
        if seq.ended or seq.num_planned == seq.num_coming:  # the latter: it forks, or ends
            return True
        # Only the step before this one can feed it, and a last token is never computed.
        return seq.num_pending > 0 and (
            seq.last_step != self._number or seq.num_coming >= seq.request.total_tokens
        )

    def _head(self) -> Choice | None:
        while self._waiting:
            seq = self._waiting[0][1]
            if seq.state is State.WAITING:
                return seq
            heappop(self._waiting)
        return None

    def _schedule(self, seq: Choice, plan: StepPlan, behind: int) -> bool:
        """Give `seq` its share; False when it was preempted, so that the next took its place, or
        must wait for blocks that a step in flight uses.

        `behind` sequences come later in the step: each is left a token and a row.
        """
        start = seq.num_planned
        limits = self.limits
        count = min(
            seq.num_coming - start,
            limits.max_chunk,
            max(1, limits.max_tokens - plan.tokens - behind),
        )
        scored = (0, 0)
        if seq.request.wants_prompt_logprobs and start + count > seq.rows_done:
            count, scored = self._score(seq, count, limits.max_rows - plan.rows - behind)
        if not self._make_writable(seq, start + count, plan):
            return False
        samples = 0
        if start + count == seq.num_coming and seq.draws:
            samples = 1 + seq.forks
            plan.samples += samples
            plan.rows += 1
        if scored[1]:
            plan.scored += scored[1] - scored[0]
            plan.rows += scored[1] - scored[0]
        feed = -1
        if seq.num_pending:
            feed = seq.feed
            plan.fed += 1
        plan.chunks.append(Chunk(seq, start, count, scored, samples, feed))
        plan.tokens += count
        return True

    def _score(self, seq: Choice, count: int, rows: int) -> tuple[int, tuple[int, int]]:
        """Cut a chunk to the rows left, one of which the last token wants to be drawn from."""
        first = max(seq.num_planned, seq.rows_done)
        last = seq.request.prompt_tokens - 1
        if first >= last:
            return count, (0, 0)
        stop = min(seq.num_planned + count, last)
        draws = seq.num_planned + count == seq.num_tokens
        if stop - first + draws > rows:
            stop = first + max(1, rows - draws)
            count = stop - seq.num_planned
        return count, (first, stop)

    def _make_writable(self, seq: Choice, end: int, plan: StepPlan) -> bool:
        """Hold, alone, the blocks that tokens num_planned..end go to.

        False, and nothing taken, when the pool can't give them: `seq` was preempted itself, or
        waits for a step in flight.
        """
        index = seq.num_planned // self._block_size
        while True:
            copies = (
                seq.shared
                and index < len(seq.blocks)
                and self._sharers(seq.blocks[index], plan) > 1
            )
            missing = -(-end // self._block_size) - len(seq.blocks)
            if missing + copies <= self.pool.available:
                break
            if not self._preempt_below(seq):
                return False
        if copies:
            self._copy_on_write(seq, index, plan)
        seq.shared = False
        for _ in range(missing):
            self.tables.append(seq.slot, len(seq.blocks), block := self.pool.allocate())
            seq.blocks.append(block)
        return True

    def _sharers(self, block: int, plan: StepPlan) -> int:
        """Sequences that hold `block`. Holds of plans don't count: their copies run before anybody
        writes."""
        holds = sum(one.held.count(block) for one in (plan, *self._flying))
        return self.pool.references(block) - holds

    def _copy_on_write(self, seq: Choice, index: int, plan: StepPlan) -> None:
        source, block = seq.blocks[index], self.pool.allocate()
        plan.copies.append((source, block))
        plan.held.append(source)  # the sequence's own hold passes to the plan
        seq.blocks[index] = block
        self.tables.append(seq.slot, index, block)

    def _preempt_below(self, seq: Choice) -> bool:
        """Preempt the lowest-ranked sequence below `seq` that is in no step; else `seq` itself,
        unless a step is in flight, whose commit may bring blocks. Whether one below it was."""
        for victim in reversed(self._running):
            if victim is seq:
                break
            if not victim.in_flight:
                self._preempt(victim)
                return True
        if not self._flying:
            self._preempt(seq)
        return False

    def _preempt(self, seq: Choice) -> None:
        self._running.remove(seq)
        self._free(seq)
        seq.state = State.WAITING
        seq.num_computed = seq.num_planned = 0
        seq.published = 0
        seq.shared = False
        seq.preemptions += 1
        self.counters.preemptions += 1
        heappush(self._waiting, (seq.key, seq))

    def _admit(self, seq: Choice, plan: StepPlan, behind: int) -> bool:
        """Start the first waiting sequence, if a slot and blocks for all its tokens are there.

        Less urgent running sequences make room for it.
        """
        while not self._slots:
            if not self._preempt_less_urgent(seq):
                return False
            behind -= 1
        found = match_prefix(self.pool, seq, self._block_size, self._digest)
        missing = -(-seq.num_tokens // self._block_size) - len(found.blocks)
        tail = [] if found.tail is None else [found.tail]
        while self.pool.available < missing:
            if tail:
                self.pool.release(tail)
                tail = []
            elif self._preempt_less_urgent(seq):
                behind -= 1
            else:
                self.pool.release(found.blocks)
                return False
        heappop(self._waiting)
        self._start(seq, plan, found.blocks, tail)
        if not self._schedule(seq, plan, behind):
            raise RunError(f"scheduler: {seq.request.request_id} was admitted without its blocks")
        return True

    def _start(self, seq: Choice, plan: StepPlan, blocks: list[int], tail: list[int]) -> None:
        seq.reserve()
        seq.state = State.RUNNING
        seq.slot = self._slots.pop()
        seq.blocks = list(blocks)
        seq.published = len(blocks)
        seq.num_computed = len(blocks) * self._block_size
        self.tables.fill(seq.slot, blocks)
        if tail:
            # All but the last token of a full block are known: compute that one in a copy.
            plan.copies.append((tail[0], block := self.pool.allocate()))
            plan.held.extend(tail)
            self.tables.append(seq.slot, len(seq.blocks), block)
            seq.blocks.append(block)
            seq.num_computed += self._block_size - 1
        seq.num_planned = seq.num_computed
        if seq.cached_tokens < 0:
            seq.cached_tokens = seq.num_computed
            self.counters.prefix_queries += seq.num_tokens
            self.counters.prefix_hits += seq.num_computed
        insort(self._running, seq, key=_key)

    def _preempt_less_urgent(self, seq: Choice) -> bool:
        victim = self._running[-1] if self._running else None
        if victim is None or victim.in_flight or victim.priority <= seq.priority:
            return False
        self._preempt(victim)
        return True

    def _may_yield(self, seq: Choice) -> bool:
        """Whether a sequence less urgent than `seq` could be preempted if it weren't in flight."""
        victim = self._running[-1] if self._running else None
        return victim is not None and victim.in_flight > 0 and victim.priority > seq.priority

    # -- commit -----------------------------------------------------------------------------

    def commit(self, plan: StepPlan, tokens: Sequence[int]) -> list[Progress]:
        """Take the sampled tokens of the oldest step in flight, in the order of its chunks and
        their samples.

        Returns one Progress per token and per ended sequence; those that ended before are silent.
        """
        if not self._flying or self._flying[0] is not plan:
            raise RunError(f"step {plan.number} isn't the oldest in flight")
        if len(tokens) != plan.samples:
            raise RunError(f"step {plan.number} wanted {plan.samples} tokens, got {len(tokens)}")
        self._flying.popleft()
        self.pool.release(plan.held)
        self.counters.steps += 1
        self.counters.tokens += plan.tokens
        progress: list[Progress] = []
        cursor = 0
        for chunk in plan.chunks:
            seq = chunk.seq
            first, cursor = cursor, cursor + chunk.samples
            if self._land(chunk):
                continue
            seq.num_computed = chunk.start + chunk.count
            if chunk.scored[1]:
                seq.rows_done = chunk.scored[1]
            if seq.num_computed // self._block_size > seq.published:
                publish_blocks(self.pool, seq, self._block_size, self._digest)
            if chunk.samples == 1:
                progress.append(self._append(seq, tokens[first], first))
            elif chunk.samples:
                drawn = tokens[first:cursor]
                for draw, (child, token) in enumerate(
                    zip((seq, *self._fork(seq)), drawn, strict=True), first
                ):
                    progress.append(self._append(child, token, draw))
            elif not seq.draws and seq.num_computed == seq.num_tokens:
                progress.append(self._finish(Progress(seq, None, -1, "length")))
        return progress

    def _land(self, chunk: Chunk) -> bool:
        """The chunk is in flight no more. Whether its sequence ended before, which is dropped with
        its last chunk."""
        seq = chunk.seq
        seq.in_flight -= 1
        seq.num_pending -= chunk.samples == 1
        if seq.ended and not seq.in_flight:
            self._drop(seq)
        return seq.ended

    def abandon(self) -> None:
        """Take back the steps in flight, since the device failed: their sequences are as before,
        save that they start over; nothing that was computed is published."""
        while self._flying:
            plan = self._flying.popleft()
            self.pool.release(plan.held)
            for chunk in plan.chunks:
                if not self._land(chunk) and not chunk.seq.in_flight:
                    self._preempt(chunk.seq)

    def _append(self, seq: Choice, token: int, draw: int) -> Progress:
        if token < 0:
            return self._finish(Progress(seq, None, draw, "error"))
        seq.append(token)
        request = seq.request
        if token in request.stop_ids:
            shown = token if request.stop_ids[token] else None
            return self._finish(Progress(seq, token, draw, "stop", shown))
        if seq.num_tokens >= request.total_tokens:
            return self._finish(Progress(seq, token, draw, "length"))
        return Progress(seq, token, draw)

    def _fork(self, seq: Choice) -> list[Choice]:
        """The other choices of a request whose prompt is done; all share its blocks.

        One that finds no slot waits, and takes the prompt's blocks from the prefix cache later.
        """
        children = [Choice(seq.request, choice + 1) for choice in range(seq.forks)]
        seq.forks = 0
        self._live[seq.request.request_id].extend(children)
        for child in children:
            child.rows_done = seq.rows_done
            child.cached_tokens = seq.cached_tokens
            child.entries = list(seq.entries)
            child.reserve()
            if not self._slots:
                heappush(self._waiting, (child.key, child))
                continue
            child.state = State.RUNNING
            child.slot = self._slots.pop()
            child.num_computed = child.num_planned = seq.num_computed
            child.published = seq.published
            child.blocks = list(seq.blocks)
            child.shared = seq.shared = True
            for block in child.blocks:
                self.pool.acquire(block)
            self.tables.fill(child.slot, child.blocks)
            insort(self._running, child, key=_key)
        return children

    def _finish(self, end: Progress) -> Progress:
        self._end(end.seq)
        self._forget(end.seq)
        return end

    def _drop(self, seq: Choice) -> None:
        if seq.state is State.RUNNING:
            self._running.remove(seq)
            self._free(seq)
        seq.state = State.FINISHED

    def _forget(self, seq: Choice) -> None:
        choices = self._live.get(seq.request.request_id, [])
        if not any(c.open for c in choices):
            self._live.pop(seq.request.request_id, None)

    def _free(self, seq: Choice) -> None:
        self.pool.release(seq.blocks)
        seq.blocks = []
        self._slots.append(seq.slot)
        seq.slot = -1

    def check(self) -> None:
        """Verify that every block, slot and step in flight is accounted for."""
        self.pool.check([*(s.blocks for s in self._running), *(p.held for p in self._flying)])
        check_running(self._running, self._flying)
        if len(self._slots) + len(self._running) != self.limits.max_seqs:
            raise RunError("scheduler: a slot is lost or held twice")

"""One run: requests leave at their moments, whether or not earlier ones were answered.

Contract: the schedule never waits for an answer. With a bound on open requests, those above it wait
here, in order, and how long is part of what is reported; so is how late this process itself was.
Every request has an Outcome, also after an interrupt.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from ropeway.serving.load.answer import Answer, Outcome
from ropeway.serving.load.connection import Connection, Pool

INTERRUPTED = "interrupted"
Progress = Callable[[int, int], None]
"""(ended, failed among them)."""

_REPORT = 0.25  # seconds between two calls of Progress


@dataclass
class Run:
    """What came of a run. Times of time.perf_counter; `cpu` in seconds of this process."""

    outcomes: list[Outcome]
    began: float
    ended: float = 0.0
    cpu: float = 0.0
    most_open: int = 0
    interrupted: bool = False


@dataclass
class _State:
    open: int = 0
    failed: int = 0
    ended: int = 0
    most_open: int = 0
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)


class Load:
    """Sends the requests of one run."""

    def __init__(
        self,
        pool: Pool,
        requests: Sequence[bytes],
        moments: Sequence[float],
        *,
        max_concurrency: int | None = None,
        timeout: float = 600.0,
        progress: Progress = lambda ended, failed: None,
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._moments = moments
        self._timeout = timeout
        self._progress = progress
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
        self._state = _State()

    async def run(self, stop: asyncio.Event) -> Run:
        """Send everything and wait for it all, or until `stop` is set."""
        run = Run([], time.perf_counter())
        cpu = time.process_time()
        reporter = asyncio.create_task(self._report())
        sender = asyncio.create_task(self._send_all(run))
        stopper = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((sender, stopper), return_when=asyncio.FIRST_COMPLETED)
        finally:
            run.interrupted = not sender.done()
            for task in (sender, stopper, reporter, *self._state.tasks):
                task.cancel()
            await asyncio.gather(sender, *self._state.tasks, return_exceptions=True)
        if not run.interrupted:
            sender.result()
        run.ended = time.perf_counter()
        run.cpu = time.process_time() - cpu
        run.most_open = self._state.most_open
        return run

    async def _send_all(self, run: Run) -> None:
        for request, moment in zip(self._requests, self._moments, strict=True):
            due = run.began + moment
            wait = due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            outcome = Outcome(due)
            run.outcomes.append(outcome)
            task = asyncio.create_task(self._one(request, outcome))
            self._state.tasks.add(task)
            task.add_done_callback(self._state.tasks.discard)
        while self._state.tasks:
            await asyncio.wait(set(self._state.tasks))

    async def _one(self, request: bytes, outcome: Outcome) -> None:
        queued = time.perf_counter()
        state = self._state
        try:
            async with self._slots:
                outcome.began = time.perf_counter()
                outcome.slot_wait = outcome.began - queued
                state.open += 1
                state.most_open = max(state.most_open, state.open)
                try:
                    await self._exchange(request, outcome)
                finally:
                    state.open -= 1
        except asyncio.CancelledError:
            outcome.error = outcome.error or INTERRUPTED
            raise
        finally:
            outcome.ended = outcome.ended or time.perf_counter()
            outcome.began = outcome.began or outcome.ended
            state.ended += 1
            state.failed += bool(outcome.error)

    async def _exchange(self, request: bytes, outcome: Outcome) -> None:
        """Send, once more if a kept connection turns out to have been closed, and listen."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        again = True
        while again:
            try:
                async with asyncio.timeout_at(deadline):
                    connection, used = await self._pool.take()
            except TimeoutError:
                outcome.error, outcome.detail = "timeout", "while connecting"
                return
            except OSError as error:
                outcome.error = f"can't connect: {error.strerror or type(error).__name__}"
                outcome.detail = str(error)
                return
            try:
                await self._listen(connection, request, outcome, deadline)
            finally:
                self._pool.give_back(connection)
            again = used and connection.untouched and outcome.error == "connection closed"
            if again:
                outcome.error = outcome.detail = ""

    async def _listen(
        self, connection: Connection, request: bytes, outcome: Outcome, deadline: float
    ) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        answer = Answer(outcome, ended)
        said = f"after {self._timeout:g} s and {{}} chunks"
        alarm = loop.call_at(
            deadline, lambda: answer.fail("timeout", said.format(len(outcome.chunks)))
        )
        try:
            connection.send(request, answer)
            await ended
        finally:
            alarm.cancel()

    async def _report(self) -> None:
        while True:
            state = self._state
            self._progress(state.ended, state.failed)
            await asyncio.sleep(_REPORT)

"""The engine's loop: take what was said, run a step, tell the news.

Contract: one thread drives the core. What is said is taken between steps, without waiting while
there is work. Each request that was added hears of its end exactly once, a device that fails
included; after failures without a token in between the loop gives up.
"""

import sys
import time
import traceback

from ropeway.compiler.errors import RequestError, RopewayError, RunError
from ropeway.runtime.engine.core import EngineCore
from ropeway.runtime.engine.messages import Update
from ropeway.runtime.structured.grammar import Grammar
from ropeway.serving.process.news import HeldNews
from ropeway.serving.process.preparation import Preparation
from ropeway.serving.process.protocol import (
    Abort,
    Accepted,
    Add,
    AskStats,
    FinishChoice,
    FromEngine,
    News,
    Progress,
    Quit,
    Rejected,
    Stats,
    ToEngine,
)
from ropeway.serving.process.sockets import Inbox, Outbox

_FAILURES = 3  # in a row, without a token between them, and the device is given up
_PROGRESS = 1.0  # seconds without news after which steps are reported


class EngineLoop:
    """Drives one core until it is told to quit."""

    def __init__(
        self,
        core: EngineCore,
        inbox: Inbox[ToEngine],
        outbox: Outbox,
        stream_interval: float | None = None,
    ) -> None:
        """`stream_interval`: see ServerSettings."""
        self._core = core
        self._inbox = inbox
        self._outbox = outbox
        self._news = HeldNews(stream_interval)
        self._preparation = Preparation(core.compile_grammar)
        self._quit = False
        self._failures = 0
        self._steps = 0  # since something was said
        self._said = time.monotonic()

    def run(self) -> None:
        """Serve until Quit. Raises RunError when the device can't go on; every request has been
        told its end then."""
        while not self._quit:
            if not self._core.has_work:
                self._tell(self._news.drain())
                self._inbox.wait(self._preparation.descriptor)
            for message in self._inbox.take():
                self._handle(message)
            for prepared, grammar in self._preparation.take():
                self._add(prepared, grammar)
            if self._core.has_work:
                self._step()
        self._tell(self._news.drain())

    # -- what was said ----------------------------------------------------------------------

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Add(request) if request.params.structured_outputs is not None:
                self._preparation.start(message)
            case Add():
                self._add(message, None)
            case Abort(request_id):
                if self._preparation.cancel(request_id):
                    self._say(Rejected(request_id, "request_id", "aborted before it began"))
                else:
                    self._core.abort(request_id)
            case FinishChoice(request_id, choice):
                self._core.finish_choice(request_id, choice)
            case AskStats():
                self._tell_stats()
            case Quit():
                self._end_all()

    def _add(self, message: Add, grammar: Grammar | RequestError | None) -> None:
        request = message.request
        try:
            if isinstance(grammar, RequestError):
                raise grammar
            self._core.add(request, grammar)
        except RequestError as error:
            self._say(Rejected(request.request_id, error.field, error.reason))
            return
        self._news.expect(request.request_id)
        if message.confirm:
            self._say(Accepted(request.request_id))

    def _tell_stats(self) -> None:
        try:
            stats = self._core.stats()
        except Exception as error:  # finishing the steps in flight may fail as a step does
            self._count_failure(error)
            stats = self._core.stats()
        self._say(Stats(stats))

    def _end_all(self) -> None:
        self._quit = True
        self._preparation.close()
        self._core.abort_all()
        while self._core.has_work:
            self._step()

    # -- steps ------------------------------------------------------------------------------

    def _step(self) -> None:
        try:
            updates = self._core.step()
        except Exception as error:  # whatever broke, the requests have ended and are to be told
            self._count_failure(error)
            return
        self._steps += 1
        now = time.monotonic()
        if updates:
            if self._failures and any(update.token is not None for update in updates):
                self._failures = 0
            running = len(self._core.scheduler.running)
            self._tell(self._news.add(updates, now, running))
        if now - self._said >= _PROGRESS:
            self._say(Progress(self._steps))

    def _count_failure(self, error: Exception) -> None:
        self._failures += 1
        if not isinstance(error, RopewayError):
            traceback.print_exc()
        print(f"ropeway engine: a step failed: {error}", file=sys.stderr, flush=True)
        self._tell(self._news.drain())
        if self._failures >= _FAILURES:
            while self._core.has_work:  # their ends
                self._tell(self._core.step())
            raise RunError(
                f"{_FAILURES} steps in a row failed, the last with: {error}: the engine gives up"
            ) from error

    # -- what is told -----------------------------------------------------------------------

    def _tell(self, updates: list[Update]) -> None:
        if updates:
            self._say(News(updates))

    def _say(self, message: FromEngine) -> None:
        self._outbox.send(message)
        self._said = time.monotonic()
        self._steps = 0

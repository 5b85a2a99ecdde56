"""A sweep: a warm-up, then one run for each request rate."""

import asyncio
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop

from ropeway.compiler.errors import RunError
from ropeway.serving.load.arrivals import arrivals
from ropeway.serving.load.connection import Pool
from ropeway.serving.load.run import Load
from ropeway.serving.load.summary import Summary, summarize
from ropeway.serving.load.target import Target
from ropeway.serving.load.workload import Ask, Synthetic, Written

Update = Callable[[str, int, int], None]
"""(what is being done, done, total)."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is asked of whom. Times in seconds, objectives in milliseconds."""

    target: Target
    model: str
    chat: bool
    workload: Synthetic | Written
    rates: Sequence[float]
    burstiness: float = 1.0
    max_concurrency: int | None = None
    timeout: float = 600.0
    seed: int = 0
    warmup: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    objectives: dict[str, float] = field(default_factory=dict)

    def run(self, update: Update) -> tuple[list[Summary], bool]:
        """The figures of each rate, and whether Ctrl-C ended it; a second Ctrl-C raises.

        Raises RunError when a warm-up request fails: the others would too.
        """
        _allow_many_connections()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._run(update))

    async def _run(self, update: Update) -> tuple[list[Summary], bool]:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            stop.set()
            loop.remove_signal_handler(signal.SIGINT)

        loop.add_signal_handler(signal.SIGINT, interrupt)
        pool = Pool(self.target.host, self.target.port, tls=self.target.tls)
        summaries: list[Summary] = []
        try:
            await self._warm_up(pool, stop, update)
            for turn, rate in enumerate(self.rates, 1):
                if not stop.is_set():
                    summaries.append(await self._one(pool, stop, turn, rate, update))
        finally:
            pool.close()
            loop.remove_signal_handler(signal.SIGINT)
        return summaries, stop.is_set()

    async def _warm_up(self, pool: Pool, stop: asyncio.Event, update: Update) -> None:
        asks = self.workload.asks(0)[: self.warmup]
        update("warm-up", 0, len(asks))
        load = Load(
            pool,
            [self._encode(ask) for ask in asks],
            [0.0] * len(asks),
            max_concurrency=1,
            timeout=self.timeout,
        )
        for outcome in (await load.run(stop)).outcomes:
            if outcome.error and not stop.is_set():
                where = self.target.address
                detail = outcome.detail and f": {outcome.detail}"
                raise RunError(f"warm-up: {where}: {outcome.error}{detail}")

    async def _one(
        self, pool: Pool, stop: asyncio.Event, turn: int, rate: float, update: Update
    ) -> Summary:
        asks = self.workload.asks(turn)

        def progress(ended: int, failed: int) -> None:
            update(f"rate {rate:g}{', some failed' if failed else ''}", ended, len(asks))

        given = [ask.at for ask in asks if ask.at is not None]
        load = Load(
            pool,
            [self._encode(ask) for ask in asks],
            given or arrivals(len(asks), rate, self.burstiness, self.seed),
            max_concurrency=self.max_concurrency,
            timeout=self.timeout,
            progress=progress,
        )
        return summarize(await load.run(stop), rate, self.objectives)

    def _encode(self, ask: Ask) -> bytes:
        return self.target.request(ask, self.model, chat=self.chat, fields=self.fields)


def _allow_many_connections() -> None:
    """An open loop holds a socket for each request that isn't answered yet."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

"""Rounds in which every engine in turn gives samples of every figure.

In a round every engine is started anew (so that start-up is sampled too, and what one process start
happened to give is no engine's figure), then the figures are gone through one by one, all engines
taking turns within each; the next round begins with another engine.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ropeway.runtime.bench.machine import Ceilings
from ropeway.runtime.bench.workload import Workload

from .errors import EngineError
from .figures import FIGURES, FIRST, LOAD, PEAK, Figure
from .noise import Watch
from .process import EngineProcess


@dataclass
class Record:
    """What an engine gave: samples by figure, the noise beside them, why it ended."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    others_share_max: float = 0.0
    error: str | None = None

    def add(self, key: str, value: float, others_share: float = 0.0) -> None:
        """Keeps a sample."""
        self.samples.setdefault(key, []).append(value)
        self.others_share_max = max(self.others_share_max, others_share)

    def medians(self) -> dict[str, float]:
        """The median of each figure's samples."""
        return {key: statistics.median(values) for key, values in self.samples.items()}


@dataclass(frozen=True)
class Entry:
    """An engine that takes part: how to start it, and what to tell it to load."""

    start: Callable[[], EngineProcess]
    settings: Mapping[str, Any]


class Contest:
    """Engines that take turns. `records` holds one for each entry, failed ones included."""

    def __init__(
        self,
        entries: Mapping[str, Entry],
        workload: Workload,
        watch: Watch,
        ceilings: Ceilings,
        note: Callable[[str], None],
    ) -> None:
        self.records = {name: Record() for name in entries}
        self._entries = entries
        self._work = workload
        self._watch = watch
        self._ceilings = ceilings
        self._note = note
        self._running: dict[str, EngineProcess] = {}

    def run(self, rounds: int) -> None:
        """Runs the rounds; whatever ends them, no engine is left running."""
        for number in range(rounds):
            names = [name for name in self._entries if self.records[name].error is None]
            first = number % max(1, len(names))
            try:
                self._round(f"round {number + 1} of {rounds}", names[first:] + names[:first])
            finally:
                for name in list(self._running):
                    self._running.pop(name).kill()
                self._watch.sessions.clear()

    def _round(self, title: str, names: list[str]) -> None:
        for name in names:
            self._note(f"{title}: starting {name}")
            self._attempt(name, self._start)
        for figure in FIGURES:
            if figure.measure is None:
                continue
            self._note(f"{title}: {figure.label}")
            if figure.bound is not None:
                self._ceilings.sample()
            for name in names * figure.turns:
                self._attempt(name, lambda name, figure=figure: self._turn(name, figure))  # type: ignore[misc]
        for name in names:
            self._attempt(name, self._finish)

    def _attempt(self, name: str, action: Callable[[str], None]) -> None:
        """Does something with an engine that is well; if it fails, it has failed for good."""
        record = self.records[name]
        if record.error is not None:
            return
        try:
            action(name)
        except EngineError as error:
            record.error = str(error)
            self._note(f"{name} failed: {error}")
            failed = self._running.pop(name, None)
            if failed is not None:
                failed.kill()
                self._watch.sessions.discard(failed.session)

    def _start(self, name: str) -> None:
        entry, record, work = self._entries[name], self.records[name], self._work
        self._watch.wait_until_idle()
        process = self._running[name] = entry.start()
        self._watch.sessions.add(process.session)

        def first_token() -> float:
            ready = process.load(entry.settings)
            record.add(LOAD, ready)
            return process.first_token(work.single)

        record.add(FIRST, *self._watch.watched(first_token))
        for prompts, new in (
            ([work.single], 8),
            ([work.prefill1024], 2),
            (work.batch8, 4),
            (work.batch32, 4),
        ):
            process.generate(prompts, min(new, work.gen))
        process.stop()

    def _turn(self, name: str, figure: Figure) -> None:
        measure, process = figure.measure, self._running[name]
        assert measure is not None
        process.resume()
        process.generate([self._work.single], 1)  # awake again
        value, others = self._watch.quietest(lambda: measure(process.generate, self._work))
        self.records[name].add(figure.key, value, others)
        process.stop()

    def _finish(self, name: str) -> None:
        process = self._running[name]
        process.resume()
        self.records[name].add(PEAK, process.peak_mib())
        del self._running[name]
        process.close()
        self._watch.sessions.discard(process.session)

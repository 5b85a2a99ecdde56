"""Samples on a quiet machine, while other engines of ours sleep: whose CPU time is whose.

`ropeway bench` counts children once they have ended; here they live through the run, so an engine's
processes are told from others by the session that it was started in.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

_LIMIT = 0.12  # others' share of one core above which a sample is taken again
_TRIES = 3
_TICKS = os.sysconf("SC_CLK_TCK")


class Watch:
    """Takes samples; `sessions` are the session ids of the engines that run now."""

    def __init__(self, sessions: set[int], patience: float, note: Callable[[str], None]) -> None:
        """`patience`: seconds spent on waiting in the whole run; then it measures as it is."""
        self.sessions = sessions
        self._patience = patience
        self._note = note

    def quietest(self, measure: Callable[[], float]) -> tuple[float, float]:
        """(figure, others' share of one core meanwhile) of the quietest of at most three tries."""
        tries: list[tuple[float, float]] = []
        while len(tries) < _TRIES:
            self.wait_until_idle()
            tries.append(self.watched(measure))
            if tries[-1][1] <= _LIMIT:
                break
        return min(tries, key=lambda entry: entry[1])

    def watched(self, measure: Callable[[], float]) -> tuple[float, float]:
        """One try: (figure, others' share of one core meanwhile)."""
        before, start = self._others(), time.monotonic()
        value = measure()
        elapsed = max(time.monotonic() - start, 1 / _TICKS)
        return value, max(0.0, (self._others() - before) / elapsed)

    def wait_until_idle(self) -> None:
        """Waits until other processes leave the machine alone, or patience ends."""
        start, told = time.monotonic(), False
        while True:
            _, share = self.watched(_pause)
            if share < _LIMIT or time.monotonic() - start > self._patience:
                break
            if not told:
                self._note(f"others compute; waiting, up to {self._patience:.0f} s in all")
                told = True
        if told:
            self._patience = max(0.0, self._patience - (time.monotonic() - start))

    def _others(self) -> float:
        """CPU seconds used by what is neither this process nor an engine."""
        own = os.times()
        mine = own.user + own.system + own.children_user + own.children_system
        return _busy() - mine - sum(_of_sessions(self.sessions))


def _pause() -> float:
    time.sleep(0.4)
    return 0.0


def _busy() -> float:
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _of_sessions(sessions: set[int]) -> list[float]:
    """CPU seconds of every process of these sessions and of their descendants in others, ended
    children included."""
    parents: dict[int, int] = {}
    session_of: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        process = int(stat.parent.name)
        parents[process], session_of[process] = int(fields[1]), int(fields[3])
        seconds[process] = sum(map(int, fields[11:15])) / _TICKS

    def belongs(process: int) -> bool:
        while process in parents:
            if session_of[process] in sessions:
                return True
            process = parents[process]
        return False

    return [used for process, used in seconds.items() if belongs(process)]

"""Samples taken on a quiet machine: one in which other processes took much CPU is taken again."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

_NOISE_LIMIT = 0.12  # others' share of one core above which a sample is taken again
_PATIENCE_S = 120.0  # spent on waiting in a whole run; a busier machine is measured as it is


class Sampler:
    """Medians of several samples, and the largest noise among those that were kept."""

    def __init__(self, samples: int, note: Callable[[str], None]) -> None:
        """`note` is told when the machine is waited for."""
        self.samples = samples
        self._note = note
        self._patience = _PATIENCE_S
        self.others_share_max = 0.0

    def median(self, measure: Callable[[], float]) -> list[float]:
        """[median, min, max] of the quietest samples of `measure`."""
        kept: list[tuple[float, float]] = []
        for _ in range(3 * self.samples):
            kept.append(self._sample(measure))
            kept.sort(key=lambda entry: entry[1])
            if len(kept) >= self.samples and kept[self.samples - 1][1] <= _NOISE_LIMIT:
                break
        kept = kept[: self.samples]
        self.others_share_max = max(self.others_share_max, kept[-1][1])
        values = [value for value, _ in kept]
        return [round(v, 4) for v in (statistics.median(values), min(values), max(values))]

    def _sample(self, measure: Callable[[], float]) -> tuple[float, float]:
        self._wait_until_idle()
        before, start = _others_seconds(), time.monotonic()
        value = measure()
        elapsed = max(time.monotonic() - start, 1e-3)
        return value, max(0.0, (_others_seconds() - before) / elapsed)

    def _wait_until_idle(self) -> None:
        start, told = time.monotonic(), False
        while time.monotonic() - start < self._patience:
            before, since = _others_seconds(), time.monotonic()
            time.sleep(0.4)
            if (_others_seconds() - before) / (time.monotonic() - since) < _NOISE_LIMIT:
                break
            if not told:
                left = self._patience
                self._note(
                    f"other processes compute; waiting for a quiet moment, up to {left:.0f} s"
                )
                told = True
        if told:
            self._patience -= time.monotonic() - start


def _others_seconds() -> float:
    """CPU seconds that other processes have used since boot."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields)
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return busy - own.user - own.system - own.children_user - own.children_system


def process_age() -> float:
    """Seconds since this process was created (Linux: to a clock tick, 10 ms)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def peak_memory_mib() -> float:
    """The process's largest resident size so far, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0

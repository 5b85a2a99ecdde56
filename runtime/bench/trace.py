"""A Chrome trace of captured steps, which chrome://tracing and Perfetto load."""

import json
from pathlib import Path
from typing import Any

from ropeway.compiler.errors import InputError
from ropeway.compiler.targets.cpu.plan import Template
from ropeway.runtime.bench.capture import Capture, CapturedStep
from ropeway.runtime.bench.plan_cost import plan_work
from ropeway.runtime.bench.roofline import label

_KERNELS, _AROUND = 1, 2  # thread ids: rows of the picture
Event = dict[str, Any]


def write_trace(path: Path, template: Template, captures: list[Capture]) -> None:
    """Writes the steps of all captures. Raises InputError when the file can't be written."""
    text = json.dumps(trace(template, captures), separators=(",", ":"))
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"--trace {path}: {error.strerror}: name a file that can be written"
        ) from None


def trace(template: Template, captures: list[Capture]) -> Event:
    """The trace: a process a capture, in which its steps follow each other.

    Durations are as measured. Starts are the sums of what came before: the second, unstamped run of
    each step is left out, and the engine's host work is its mean. Microseconds, sorted by start.
    """
    events: list[Event] = []
    for pid, capture in enumerate(captures, start=1):
        events.append(_name("process_name", pid, 0, f"{capture.shape} ({capture.bucket.name})"))
        events.append(_name("thread_name", pid, _KERNELS, "plan steps"))
        events.append(_name("thread_name", pid, _AROUND, "engine"))
    timed = [
        event
        for pid, capture in enumerate(captures, start=1)
        for event in _Timeline(template, capture, pid).events()
    ]
    timed.sort(key=lambda event: (event["ts"], -event["dur"]))
    return {"traceEvents": events + timed, "displayTimeUnit": "ms"}


class _Timeline:
    """The events of one capture."""

    def __init__(self, template: Template, capture: Capture, pid: int) -> None:
        self._template = template
        self._capture = capture
        self._pid = pid
        self._events: list[Event] = []

    def events(self) -> list[Event]:
        """All of them, step after step."""
        at, host = 0.0, self._capture.host / 1e3
        for number, step in enumerate(self._capture.steps):
            self._add_kernels(step, at)
            sizes = step.sizes
            details = {
                "tokens": sizes.tokens,
                "requests": len(sizes.spans),
                "longest": max((length for _, length in sizes.spans), default=0),
            }
            around: tuple[tuple[str, str, float, Event], ...] = (
                (f"step {number}", "step", step.wall / 1e3, details),
                ("sampling", "engine", step.sample / 1e3, {}),
                ("host work (mean)", "engine", host, {}),
            )
            for name, category, length, shown in around:
                self._add(_AROUND, name, category, (at, length), shown)
                at += length
        return self._events

    def _add_kernels(self, step: CapturedStep, at: float) -> None:
        steps, works = self._template.steps, plan_work(self._template, step.sizes)
        for plan_step, work, nanoseconds in zip(steps, works, step.kernels, strict=True):
            shown = label(self._template, plan_step, step.sizes)
            seconds = max(nanoseconds, 1) / 1e9
            details = {
                "op": shown.op,
                "source": plan_step.op.partition(" at ")[2],
                "rows": shown.rows,
                "bytes": work.bytes,
                "weight_bytes": work.weight_bytes,
                "kv_bytes": work.kv_bytes,
                "flops": work.flops,
                "GB/s": round(work.bytes / seconds / 1e9, 2),
                "GFLOP/s": round(work.flops / seconds / 1e9, 1),
            }
            name = f"{plan_step.kernel} {shown.what}"
            length = nanoseconds / 1e3
            self._add(_KERNELS, name, plan_step.kernel, (at, length), details)
            at += length

    def _add(
        self, tid: int, name: str, category: str, span: tuple[float, float], details: Event
    ) -> None:
        self._events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "pid": self._pid,
                "tid": tid,
                "ts": round(span[0], 3),
                "dur": round(span[1], 3),
                "args": details,
            }
        )


def _name(kind: str, pid: int, tid: int, text: str) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": text}}

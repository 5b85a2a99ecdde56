"""Looks into running processes: memory, descriptors, threads, tasks and objects."""

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.server import RunningServer, wait_until

_HERE = Path(__file__).parent


def watched() -> dict[str, str]:
    """The environment of a server that `Census.objects` can ask."""
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(_HERE), *([others] if others else [])])}


@dataclass(frozen=True)
class Footprint:
    """One process now: resident bytes, open descriptors, threads."""

    resident: int
    descriptors: int
    threads: int


def footprint(pid: int) -> Footprint:
    """As the kernel counts."""
    status = Path(f"/proc/{pid}/status").read_text()

    def field(name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
        assert found, f"process {pid} says no {name}"
        return int(found[1])

    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return Footprint(field("VmRSS") << 10, descriptors, field("Threads"))


def objects(server: RunningServer, pid: int) -> dict[str, Any]:
    """`tasks` that haven't ended, `where` they are, and Python `objects` of a process of a server
    that was started with `watched()`."""
    before = len(server.log)
    os.kill(pid, signal.SIGUSR1)

    def answers() -> list[dict[str, Any]]:
        return [line for line in server.log[before:] if line.get("census") == pid]

    wait_until(answers, 20, f"process {pid} counts its objects")
    return answers()[0]


def slope(values: list[float]) -> float:
    """Of the line through values at 0, 1, 2... that fits best."""
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    above = sum((k - middle) * (value - mean) for k, value in enumerate(values))
    return above / sum((k - middle) ** 2 for k in range(len(values)))

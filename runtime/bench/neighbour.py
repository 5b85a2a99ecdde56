"""A busy neighbour: a process that spins on one core while the engine works.

The neighbour ends with the block that it was started for, whatever ends that; and by itself when
its time is up or its parent is gone. Run as a program this file is the neighbour.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ropeway.compiler.errors import RunError
from ropeway.runtime.bench.quiet import Sampler

_LOOK_EVERY = 100_000  # turns of the loop between two looks at the clock: milliseconds
_START_S = 30.0
_SLOWEST = 20  # a run that is this many times slower than the quiet one is given up on


def beside_neighbour(rate: Callable[[], float], sampler: Sampler) -> dict[str, list[float] | float]:
    """Medians of `rate`, of some work a second, alone and beside a busy neighbour.

    Raises RunError when the neighbour makes the work slower than can be waited for.
    """
    began = time.monotonic()
    quiet = sampler.median(rate)
    limit = _START_S + _SLOWEST * (time.monotonic() - began)
    with busy_neighbour(limit):
        busy = [rate() for _ in range(sampler.samples)]
    found = [round(one, 4) for one in (statistics.median(busy), min(busy), max(busy))]
    return {
        "quiet_tok_s": quiet,
        "busy_tok_s": found,
        "busy_over_quiet": round(found[0] / quiet[0], 3),
    }


@contextmanager
def busy_neighbour(seconds: float) -> Iterator[int]:
    """Keeps the last core that we may use busy during the block, for at most `seconds`.

    Yields the neighbour's process id, once it spins. Raises RunError when it doesn't start, or
    ended before the block did.
    """
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else -1
    command = [sys.executable, "-m", "ropeway.runtime.bench.neighbour"]
    command += ["--core", str(core), "--seconds", str(seconds), "--parent", str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        try:
            if child.stdout is None or child.stdout.readline() != b"spinning\n":
                raise RunError("the busy neighbour didn't start: run the bench again")
            yield child.pid
            if child.poll() is not None:
                raise RunError(
                    f"the busy neighbour ended before the work beside it did, after {seconds:.0f} "
                    f"s: the work came almost to a halt"
                )
        finally:
            child.kill()  # it has nothing to tidy up; leaving the outer block waits for its end


def spin(seconds: float, parent: int) -> None:
    """Computes until the time is up, or until `parent` isn't this process's parent any more."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and os.getppid() == parent:
        for _ in range(_LOOK_EVERY):
            pass


def main() -> None:
    """The neighbour's process."""
    parser = argparse.ArgumentParser(prog="ropeway.runtime.bench.neighbour")
    parser.add_argument("--core", type=int, default=-1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--parent", type=int, default=os.getppid())
    arguments = parser.parse_args()
    if arguments.core >= 0:
        os.sched_setaffinity(0, {arguments.core})
    print("spinning", flush=True)
    spin(arguments.seconds, arguments.parent)


if __name__ == "__main__":
    main()

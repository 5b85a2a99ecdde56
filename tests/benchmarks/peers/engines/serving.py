"""An engine's side of the link: a JSON object a line, requests on stdin, replies on stdout.

    {"load": SETTINGS}                       -> {"created": seconds | null}
    {"generate": {"prompts": P, "new": N}}   -> {"seconds": S, "tokens": T}
    {"peak": {}}                             -> {"mib": M}
    {"quit": {}}                             the process ends

Every engine is timed by the same two lines below. An error is answered as {"error": text} and ends
the process. What libraries print goes to stderr, which is the log.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .memory import peak_mib

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Settings:
    """What an engine is to load. Sizes in tokens; `options` are the engine's own."""

    model: str
    threads: int
    longest: int  # tokens of the longest sequence, new ones included
    requests: int  # most requests at a time
    options: dict[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """A loaded engine."""

    created: float | None  # time.monotonic() when its process was created; None: this process
    process: int  # the process whose memory counts, with its children

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """Greedy, exactly `new` ids for each prompt: end-of-text ids don't end it."""

    def close(self) -> None:
        """Ends what it started."""


def die_with_parent() -> None:
    """The kernel kills the calling process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def use_cores(threads: int) -> list[int]:
    """Keeps this process and its children to as many cores as threads; returns them."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.sched_setaffinity(0, cores)
    return cores


def serve(load: Callable[[Settings], Engine]) -> None:
    """Answers requests until told to quit or until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    die_with_parent()
    served = _Served(load)
    try:
        for line in sys.stdin:
            (verb, arguments), *_ = json.loads(line).items()
            if verb == "quit":
                break
            print(json.dumps(served.answer(verb, arguments)), file=replies, flush=True)
    except Exception as error:  # whatever an engine raises: the driver names it
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        print(json.dumps({"error": text}), file=replies, flush=True)
    finally:
        served.close()


class _Served:
    def __init__(self, load: Callable[[Settings], Engine]) -> None:
        self._load = load
        self._engine: Engine | None = None

    def answer(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if verb == "load":
            settings = Settings(**arguments)
            use_cores(settings.threads)
            self._engine = self._load(settings)
            return {"created": self._engine.created}
        if self._engine is None:
            raise RuntimeError(f"{verb} came before load")
        if verb == "generate":
            start = time.perf_counter()
            tokens = self._engine.generate(**arguments)
            return {"seconds": time.perf_counter() - start, "tokens": tokens}
        if verb == "peak":
            return {"mib": peak_mib(self._engine.process)}
        raise RuntimeError(f"unknown request {verb!r}")

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

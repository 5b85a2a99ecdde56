"""The engine's process as its parent sees it: started, watched, ended.

Contract: the child gets its setup on stdin and nothing in its arguments; its end is noticed by the
kernel's word (a pidfd), not by asking. Start it from a thread that lives as long as it should: it
dies with that thread.
"""

import asyncio
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ropeway.serving.process.prestart import ENGINE_COMMAND, start_interpreter
from ropeway.serving.process.protocol import EngineSetup


class EngineProcess:
    """One engine process."""

    def __init__(
        self,
        setup: EngineSetup,
        command: Sequence[str] = ENGINE_COMMAND,
        child: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        """Start it, unless `child` was started before. Raises RunError when the system won't."""
        self._child = child or start_interpreter(command)
        self._exit: int | None = None
        self._watched: tuple[asyncio.AbstractEventLoop, int] | None = None
        try:
            assert self._child.stdin is not None
            self._child.stdin.write(msgspec.json.encode(setup) + b"\n")
            self._child.stdin.flush()
        except OSError:
            pass  # it died at once, which whoever watches it learns

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether it hasn't ended yet."""
        return self._child.poll() is None

    def watch(self, loop: asyncio.AbstractEventLoop, ended: Callable[[], None]) -> None:
        """Call `ended` once, in `loop`, when the process has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:  # it was reaped
            loop.call_soon(ended)
            return

        def gone() -> None:
            self._unwatch()
            ended()

        self._watched = loop, descriptor
        loop.add_reader(descriptor, gone)

    def _unwatch(self) -> None:
        if self._watched is not None:
            loop, descriptor = self._watched
            self._watched = None
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def kill(self) -> None:
        """End it now and wait for that, which takes no time worth mentioning."""
        self._unwatch()
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        if self._child.stdin is not None:
            self._child.stdin.close()

    def last_words(self) -> str:
        """How it ended, for a person."""
        code = self._child.poll()
        if code is None:
            return "it is still running"
        if code >= 0:
            return f"exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"killed by {name}" + (", out of memory perhaps" if name == "SIGKILL" else "")


class Restarts:
    """When to start another engine: at once after a good while, later each time, then no more."""

    def __init__(self, most: int = 5, window: float = 120.0, first_delay: float = 0.25) -> None:
        """At most `most` within `window` seconds; the second waits `first_delay`, then doubling."""
        self.most = most
        self.window = window
        self._first_delay = first_delay
        self._deaths: deque[float] = deque()

    def after_death(self, now: float) -> float | None:
        """Seconds to wait before the next start; None: give up."""
        self._deaths.append(now)
        while now - self._deaths[0] > self.window:
            self._deaths.popleft()
        count = len(self._deaths)
        if count > self.most:
            return None
        return 0.0 if count == 1 else self._first_delay * 2.0 ** (count - 2)

"""`ropeway serve` as a process: started, waited for and ended within bounds."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from support.command import PROGRAM

_START, _STOP = 60.0, 40.0  # seconds


class RunningServer:
    """`url` is where it serves; `log` holds the lines of its JSON log, and others as text."""

    def __init__(
        self, artifact: Path, *options: object, environment: dict[str, str] | None = None
    ) -> None:
        command = [str(PROGRAM), "serve", str(artifact), "--port", "0", "--log-format", "json"]
        if "--threads" not in options:
            command += ["--threads", "1"]
        self.process = subprocess.Popen(
            [*command, *map(str, options)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.log: list[dict[str, Any]] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(_START) or not self.url:
            self.kill()
            raise AssertionError(f"the server didn't start: {self.text()}")

    @property
    def url(self) -> str:
        """http://host:port, once it is ready."""
        return next((str(e["address"]) for e in list(self.log) if e.get("step") == "ready"), "")

    @property
    def pid(self) -> int:
        """Of the HTTP process."""
        return self.process.pid

    def children(self) -> list[int]:
        """Processes that it has started and that live."""
        listed = Path(f"/proc/{self.pid}/task").glob("*/children")
        return [int(pid) for tasks in listed for pid in tasks.read_text().split()]

    def text(self) -> str:
        """All of the log."""
        return "\n".join(str(line.get("message", line)) for line in self.log)

    def client(self, **options: Any) -> httpx.Client:
        """An HTTP client of it."""
        return httpx.Client(base_url=self.url, **{"timeout": 60.0, **options})

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the signal and wait for the end; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end; kills what doesn't come to one."""
        try:
            code = self.process.wait(_STOP)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._reader.join(_STOP)
        return code

    def kill(self) -> None:
        """End it without asking."""
        self.process.kill()
        self.process.wait(_STOP)
        self._reader.join(_STOP)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                entry = json.loads(line)
            except ValueError:
                entry = line.rstrip("\n")
            self.log.append(entry if isinstance(entry, dict) else {"message": entry})
            if self.log[-1].get("step") == "ready":
                self._ready.set()
        self._ready.set()  # the end: nothing more comes


@contextmanager
def running_server(
    artifact: Path, *options: object, environment: dict[str, str] | None = None
) -> Iterator[RunningServer]:
    """A server for the length of a block."""
    server = RunningServer(artifact, *options, environment=environment)
    try:
        yield server
    finally:
        server.stop()


def is_running(pid: int) -> bool:
    """Whether the process exists and isn't a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(holds: Any, seconds: float, what: str) -> None:
    """Poll `holds()`; fails when it doesn't come true in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)

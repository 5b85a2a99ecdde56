"""A server under test, in a session of its own; asleep while another one is measured."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from peers.errors import EngineError

_START_LIMIT_S = 600.0
_END_LIMIT_S = 20.0


class Server:
    """Started at once; `ready` waits. `{port}` in the command is replaced by a free port."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.port = _free_port()
        self._log = log
        self._began = time.monotonic()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [word.replace("{port}", str(self.port)) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    @property
    def session(self) -> int:
        """Its session id, which is its process group too."""
        return self._process.pid

    def ready(self) -> float:
        """Seconds from the creation of its process until /health said 200. Raises EngineError."""
        while time.monotonic() - self._began < _START_LIMIT_S:
            if self._process.poll() is not None:
                raise EngineError(f"ended with code {self._process.returncode}: see {self._log}")
            if self._healthy():
                return time.monotonic() - self._began
            time.sleep(0.01)
        raise EngineError(f"wasn't ready within {_START_LIMIT_S:.0f} s: see {self._log}")

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        """It computes no more until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undoes `stop`."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends it and everything that it started; first by asking."""
        self.resume()
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_LIMIT_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""A server under test, in a session of its own; asleep while another one is measured."""

import contextlib
import http.client
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from peers.errors import EngineError
from peers.session import SessionProcess

_START_LIMIT_S = 600.0
_END_LIMIT_S = 20.0


class Server(SessionProcess):
    """Started at once; `ready` waits. `{port}` in the command is replaced by a free port."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.port = _free_port()
        self._log = log
        self._began = time.monotonic()
        super().__init__(
            [word.replace("{port}", str(self.port)) for word in command],
            environment,
            log,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def ready(self) -> float:
        """Seconds from the creation of its process until /health said 200. Raises EngineError."""
        while time.monotonic() - self._began < _START_LIMIT_S:
            if self.process.poll() is not None:
                raise EngineError(f"ended with code {self.process.returncode}: see {self._log}")
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

    def close(self) -> None:
        """Ends it and everything that it started; first by asking."""
        self.resume()
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_LIMIT_S)
        self.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

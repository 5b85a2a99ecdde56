"""A process in a session of its own, with all that it starts: stopped, resumed and ended as one."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class SessionProcess:
    """Started at once; what it says on stderr goes to the end of `log`."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, **streams: Any
    ) -> None:
        """`streams`: stdin and stdout, as Popen takes them."""
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stderr=errors, env=environment, start_new_session=True, **streams
            )

    @property
    def session(self) -> int:
        """Its session id, which is its process group too."""
        return self.process.pid

    def stop(self) -> None:
        """It computes no more until `resume`."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undoes `stop`."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it and everything that it started, now."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        """To the whole group; nothing when that has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.session, number)

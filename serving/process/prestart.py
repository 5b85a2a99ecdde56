"""Starts the engine's interpreter before anybody knows what it will run.

Contract: imports next to nothing, so that a server can do this first and import the rest while the
engine's process does the same. The process waits for its setup on stdin and ends with it.
"""

import subprocess
import sys
from collections.abc import Sequence

from ropeway.compiler.errors import RunError

# -P: the current folder isn't searched for modules, for it may hold anything.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "ropeway.serving.process.engine_main")


def start_interpreter(command: Sequence[str] = ENGINE_COMMAND) -> "subprocess.Popen[bytes]":
    """The process, not told anything yet. Raises RunError when the system won't start one."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # Without a stderr of ours, number 2 may be any file by now.
            stderr=subprocess.DEVNULL if sys.stderr is None else None,
            start_new_session=True,  # a Ctrl-C is for the server, which ends the engine
        )
    except OSError as error:
        raise RunError(f"the engine's process can't be started: {error}") from error


_ahead: "list[subprocess.Popen[bytes]]" = []


def start_ahead() -> None:
    """Start one for whoever asks `take_started`."""
    _ahead.append(start_interpreter())


def take_started() -> "subprocess.Popen[bytes] | None":
    """The process that `start_ahead` started, once; None without one."""
    return _ahead.pop() if _ahead else None

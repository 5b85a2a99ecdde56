"""The driver's side of the link: one engine in a process and a session of its own.

Between its turns an engine is stopped by SIGSTOP, its whole process group: threads that spin while
they wait for work take nothing from the engine that is measured.
"""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import EngineError
from .session import SessionProcess

LOAD_LIMIT_S = 600.0
ANSWER_LIMIT_S = 300.0
_QUIT_LIMIT_S = 20.0


class EngineProcess(SessionProcess):
    """A started engine. Close it whatever happens."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        self._received = b""
        self.created = time.monotonic()
        super().__init__(command, environment, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def load(self, settings: Mapping[str, Any]) -> float:
        """Loads; seconds from the creation of the engine's process until it was ready."""
        answer = self._ask("load", settings, LOAD_LIMIT_S)
        ready = time.monotonic()
        self.created = answer["created"] or self.created
        return ready - self.created

    def generate(self, prompts: list[list[int]], new: int) -> float:
        """Seconds that the engine took. Raises EngineError unless it gave `new` ids to each."""
        answer = self._ask("generate", {"prompts": prompts, "new": new}, ANSWER_LIMIT_S)
        given = [len(tokens) for tokens in answer["tokens"]]
        if given != [new] * len(prompts):
            raise EngineError(f"asked for {new} tokens to {len(prompts)} prompts, got {given}")
        return float(answer["seconds"])

    def first_token(self, prompt: list[int]) -> float:
        """Seconds from the creation of the engine's process to the end of its first answer."""
        self.generate([prompt], 1)
        return time.monotonic() - self.created

    def peak_mib(self) -> float:
        """The most memory it has held."""
        return float(self._ask("peak", {}, ANSWER_LIMIT_S)["mib"])

    def close(self) -> None:
        """Ends it and everything that it started; first by asking."""
        self.resume()
        with contextlib.suppress(EngineError, subprocess.TimeoutExpired):
            self._send("quit", {})
            self.process.wait(_QUIT_LIMIT_S)
        self.kill()

    def kill(self) -> None:
        """Ends it and everything that it started, now."""
        super().kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _ask(self, verb: str, arguments: Mapping[str, Any], limit: float) -> dict[str, Any]:
        self._send(verb, arguments)
        answer: dict[str, Any] = json.loads(self._line(time.monotonic() + limit, verb, limit))
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def _send(self, verb: str, arguments: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({verb: arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineError(self._ended()) from error

    def _line(self, deadline: float, verb: str, limit: float) -> bytes:
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        while b"\n" not in self._received:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], left)[0]:
                raise EngineError(f"{verb}: no answer in {limit:.0f} s")
            received = os.read(pipe, 1 << 16)
            if not received:
                raise EngineError(self._ended())
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _ended(self) -> str:
        code = self.process.wait()
        lines = self._log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return f"ended with code {code}: {last[:200]}"

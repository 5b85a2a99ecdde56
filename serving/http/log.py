"""The server's log, on standard error: lines for a person, or JSON objects for a machine.

Contract: logging never fails and never ends the server, be the disk full or the pipe closed.
"""

import json
import logging
import sys
import time
from typing import TextIO


class Log:
    """`fields` of a line are shown in JSON only; its text says them too."""

    def __init__(self, *, as_json: bool = False, stream: TextIO | None = None) -> None:
        self._as_json = as_json
        self._stream = sys.stderr if stream is None else stream

    def info(self, text: str, **fields: object) -> None:
        """Something that happened."""
        self._line("info", text, fields)

    def warning(self, text: str, **fields: object) -> None:
        """Something that a person should look at."""
        self._line("warning", text, fields)

    def failure(self, text: str, trace: str) -> None:
        """Something that went wrong in the server; `trace` is for who repairs it."""
        self._line("error", text, {"trace": trace})

    def _line(self, level: str, text: str, fields: dict[str, object]) -> None:
        now = time.time()
        text = " ".join(text.split())
        if self._as_json:
            line = json.dumps({"time": round(now, 3), "level": level, "message": text, **fields})
        else:
            clock = time.strftime("%H:%M:%S", time.localtime(now))
            mark = "" if level == "info" else f"{level}: "
            line = f"{clock} {mark}{text}"
            if "trace" in fields:
                line += f"\n{fields['trace']}".rstrip()
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass  # nobody to tell


class LogHandler(logging.Handler):
    """Takes what libraries log, from warnings up."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        if record.exc_info:
            self._log.failure(
                record.getMessage(), logging.Formatter().formatException(record.exc_info)
            )
        else:
            self._log.warning(f"{record.name}: {record.getMessage()}")

"""An engine process whose device breaks when it is told to: by two tokens of a prompt."""

import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from ropeway.compiler.errors import RunError
from ropeway.runtime.engine_options import EngineOptions
from ropeway.runtime.loader import Engine, load_engine

_MARK = 257  # a special token, which no random prompt holds
FAIL, HANG, DIE, BUG, SLOW = FAULTS = [(_MARK, kind) for kind in range(5)]
_TESTS = Path(__file__).resolve().parents[1]


def command() -> tuple[str, ...]:
    """What starts it, for an EngineClient."""
    code = f"import sys; sys.path.insert(0, {str(_TESTS)!r}); from support import faulty_engine; "
    return (sys.executable, "-c", code + "sys.exit(faulty_engine.run())")


class FaultyQueue:
    """A step queue that breaks at the step that computes the tokens of a fault."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._slow = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def enqueue(self, job: Any) -> int:
        """See StepQueue."""
        ids = job.inputs.ids.tolist()
        faults = set(pairwise(ids)) & set(FAULTS)
        if FAIL in faults:
            raise RunError("the device broke")
        if BUG in faults:
            raise IndexError("nobody thought of this")
        if HANG in faults:
            time.sleep(1000)
        if DIE in faults:
            os.kill(os.getpid(), signal.SIGKILL)
        if SLOW in faults:
            self._slow = 0.02
        time.sleep(self._slow)
        return int(self._inner.enqueue(job))


def _load(program: str, options: EngineOptions, opened: Callable[[Any], None]) -> Engine:
    engine = load_engine(program, options, opened)
    engine.core._queue = FaultyQueue(engine.core._queue)  # type: ignore[assignment]
    return engine


def run() -> int:
    """The engine's main."""
    from ropeway.serving.process.engine_main import main  # noqa: PLC0415  (only in the process)

    return main(_load)

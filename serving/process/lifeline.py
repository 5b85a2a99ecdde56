"""The engine process doesn't outlive its parent, however that ends.

Two means, since each has a gap: the kernel's parent-death signal (set late, if the parent died
before) and a pipe of the parent's (read by a thread, which a stuck interpreter wouldn't run).
"""

import ctypes
import os
import signal
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, pipe: int) -> None:
    """End this process when process `parent` ends or the other end of `pipe` is closed.

    The kernel counts the thread that started this process as the parent.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch, args=(pipe,), name="lifeline", daemon=True).start()


def _watch(pipe: int) -> None:
    while os.read(pipe, 4096):
        pass
    os._exit(1)

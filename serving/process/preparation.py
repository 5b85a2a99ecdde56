"""Where a request waits whose grammar is to be compiled, beside the loop that runs steps.

Contract: each request that was started comes out once, with its grammar or the reason against it,
unless it was cancelled. Everything but the compiling happens in the loop's thread.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from ropeway.compiler.errors import RequestError
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.runtime.sampling.structured import FIELD
from ropeway.serving.process.protocol import Add

T = TypeVar("T")


class Preparation(Generic[T]):
    """One thread: the cores are for the steps."""

    def __init__(self, work: Callable[[SamplingParams], T]) -> None:
        """`work` raises RequestError for what can't be compiled."""
        self._work = work
        self._waiting: dict[str, Add] = {}
        self._done: SimpleQueue[tuple[Add, T | RequestError]] = SimpleQueue()
        self._pool = ThreadPoolExecutor(1, "grammars")
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable: `take` some

    def start(self, message: Add) -> None:
        """Compile for this request, after those before it."""
        self._waiting[message.request.request_id] = message
        self._pool.submit(self._run, message)

    def _run(self, message: Add) -> None:
        if message.request.request_id in self._waiting:
            self._done.put((message, self._result(message.request.params)))
            os.eventfd_write(self.descriptor, 1)

    def _result(self, params: SamplingParams) -> T | RequestError:
        try:
            return self._work(params)
        except RequestError as error:
            return error
        except Exception as error:  # a compiler that fails costs one request, not the engine
            return RequestError(FIELD, f"can't be compiled: {type(error).__name__}: {error}")

    def cancel(self, request_id: str) -> bool:
        """Forget a request; False when it isn't here."""
        return self._waiting.pop(request_id, None) is not None

    def take(self) -> Iterator[tuple[Add, T | RequestError]]:
        """Those that are through."""
        if not self._waiting:
            return
        try:
            os.eventfd_read(self.descriptor)
            while True:
                message, result = self._done.get_nowait()
                if self.cancel(message.request.request_id):
                    yield message, result
        except (BlockingIOError, Empty):
            return

    def close(self) -> None:
        """Forget all of them."""
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

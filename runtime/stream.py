"""The iterator that `LLM.stream` returns."""

from collections.abc import Callable, Iterator
from types import TracebackType

from ropeway.runtime.assembly import Assembly
from ropeway.runtime.outputs import CompletionDelta


class CompletionStream(Iterator[CompletionDelta]):
    """Yields a request's deltas; `close`, leaving a `with` block or dropping it aborts.

    A generator won't do: one that was never started runs no `finally`. A dropped stream drops its
    assembly, by which the LLM knows that nobody waits any more.
    """

    def __init__(
        self,
        assembly: Assembly,
        advance: Callable[[], None],
        drop: Callable[[list[Assembly]], None],
    ) -> None:
        """`advance` runs one step; `drop` ends a request now."""
        self._assembly = assembly
        self._advance = advance
        self._drop = drop
        self._closed = False

    @property
    def request_id(self) -> str:
        """What `LLM.abort` takes."""
        return self._assembly.request.request_id

    def __next__(self) -> CompletionDelta:
        """The next delta; runs steps until there is one. Raises RunError when the run fails."""
        deltas = self._assembly.deltas
        if self._closed or deltas is None:
            raise StopIteration
        try:
            while not deltas and not self._assembly.finished:
                self._advance()
        except BaseException:
            self.close()
            raise
        if deltas and self._assembly.error is None:
            return deltas.popleft()
        self.close()
        self._assembly.raise_error()
        raise StopIteration

    def close(self) -> None:
        """Abort the request if it isn't finished; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._drop([self._assembly])

    def __enter__(self) -> "CompletionStream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

"""One request on its way: its news as they come, or its whole output at the end.

Contract: every generation ends exactly once: its choices finish, or it fails with an ApiError.
News that nobody has asked for yet are joined, so that a slow reader costs no more memory than the
answer itself.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

from ropeway.runtime.assembly import Assembly
from ropeway.runtime.engine.messages import Update
from ropeway.runtime.outputs import CompletionDelta, RequestOutput
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.serving.errors import ApiError

_JOIN_AT = 64  # deltas, or two a choice if that is more


class EngineGone(ApiError):  # noqa: N818
    """The engine died, or can't be reached, before the request had ended."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, kind="server_error", code="engine_gone")


@dataclass(frozen=True, slots=True)
class Submission:
    """A request for the engine. Lower `priority` runs first; `salt` keeps prefixes apart."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    prompt_text: str | None = None
    priority: int = 0
    salt: str = ""


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """What is left of a request that has ended. Moments are of time.monotonic(), in seconds.

    `token_times` has for each choice the moment at which each of its tokens got here.
    `finish_reasons` has "error" for choices that ended with the engine.
    """

    request_id: str
    params: SamplingParams
    arrival: float
    ended: float
    prompt_tokens: int
    cached_tokens: int
    token_times: list[list[float]]
    finish_reasons: list[str]

    @property
    def output_tokens(self) -> int:
        """Over all choices."""
        return sum(map(len, self.token_times))

    @property
    def first_token(self) -> float | None:
        """When the first token came."""
        return min((times[0] for times in self.token_times if times), default=None)


class Generation:
    """One request, n choices. Also a context manager that aborts what hasn't ended."""

    def __init__(
        self,
        assembly: Assembly,
        arrival: float,
        *,
        abort: Callable[[str], None],
        ended: Callable[["Generation"], None],
    ) -> None:
        """`abort` tells the engine; `ended` is called once, when nothing more will come."""
        self._assembly = assembly
        self._arrival = arrival
        self._abort = abort
        self._ended = ended
        self._aborted = False
        self._error: ApiError | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._times: list[list[float]] = [[] for _ in range(self.params.n)]
        self._join_at = max(_JOIN_AT, 2 * self.params.n)
        self._end = 0.0

    # -- what it is -------------------------------------------------------------------------

    @property
    def request_id(self) -> str:
        """The engine's name for it."""
        return self._assembly.request.request_id

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The prompt's token ids."""
        return self._assembly.request.prompt

    @property
    def params(self) -> SamplingParams:
        """How it is sampled."""
        return self._assembly.request.params

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache; known with the first news."""
        return self._assembly.cached_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens so far, over all choices."""
        return self._assembly.output_tokens

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self._error is not None or self._assembly.finished

    @property
    def error(self) -> ApiError | None:
        """What ended it, when that wasn't the engine's own end."""
        return self._error

    # -- for its owner ----------------------------------------------------------------------

    async def news(self) -> list[CompletionDelta]:
        """Everything since the last call, one delta a choice; waits until there is some.

        [] once all choices have ended. Raises ApiError when it failed. Only for a generation that
        was submitted with `streaming`; one caller at a time.
        """
        deltas = self._assembly.deltas
        if deltas is None:
            raise ValueError("news: the request was submitted without streaming")
        while not deltas and not self.finished:
            await self._change()
        joined = join_deltas(deltas)
        deltas.clear()
        if self._error is not None:
            joined = [delta for delta in joined if delta.finish_reason != "error"]
            if not joined:
                raise self._error
        return joined

    async def output(self) -> RequestOutput:
        """The whole output, at its end. Raises EngineGone when the engine died, another ApiError
        when the run failed."""
        while not self.finished:
            await self._change()
        if self._error is not None:
            raise self._error
        return self._assembly.output()

    def so_far(self) -> RequestOutput:
        """What has come up to now; prompt logprobs are whole with the first news."""
        return self._assembly.output()

    def abort(self) -> None:
        """End it: its open choices finish with "abort" soon. Again, or after the end: nothing."""
        if not self._aborted and not self.finished:
            self._aborted = True
            self._abort(self.request_id)

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    async def _change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    # -- for the client ---------------------------------------------------------------------

    def push(self, update: Update, now: float) -> bool:
        """Take one update, at `now`; True when a stop string ended its choice, which the engine
        must then be told."""
        if self.finished:
            return False
        if update.token is not None:
            self._times[update.choice].append(now)
        found = self._assembly.push(update)
        deltas = self._assembly.deltas
        if deltas is not None and len(deltas) >= self._join_at:
            joined = join_deltas(deltas)
            deltas.clear()
            deltas.extend(joined)
        if self._assembly.finished:
            if self._assembly.error is not None:
                self._error = ApiError(500, self._assembly.error, kind="server_error")
            self._finish(now)
        self._wake()
        return found

    def fail(self, error: ApiError, now: float) -> None:
        """End it with an error, unless it has ended."""
        if not self.finished:
            self._error = error
            self._finish(now)
            self._wake()

    def _finish(self, now: float) -> None:
        self._end = now
        self._ended(self)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def record(self) -> GenerationRecord:
        """What metrics and logs want to know, after the end."""
        output = self._assembly.output()
        return GenerationRecord(
            request_id=self.request_id,
            params=self.params,
            arrival=self._arrival,
            ended=self._end,
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self.cached_tokens,
            token_times=self._times,
            finish_reasons=[choice.finish_reason or "error" for choice in output.outputs],
        )


def join_deltas(deltas: Iterable[CompletionDelta]) -> list[CompletionDelta]:
    """One delta a choice, in the order in which the choices first appear."""
    by_choice: dict[int, list[CompletionDelta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.index, []).append(delta)
    return [_joined(group) for group in by_choice.values()]


def _joined(group: list[CompletionDelta]) -> CompletionDelta:
    if len(group) == 1:
        return group[0]
    last = group[-1]
    logprobs = [entry for delta in group for entry in delta.logprobs or ()]
    return CompletionDelta(
        request_id=last.request_id,
        index=last.index,
        text="".join([delta.text for delta in group]),
        token_ids=[token for delta in group for token in delta.token_ids],
        logprobs=logprobs or None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )

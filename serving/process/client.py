"""The engine as the HTTP process sees it: requests in, generations out, and how it fares.

Contract: lives in one asyncio loop. Whatever is submitted ends exactly once, whoever dies; a
request that can't be served is refused before anything of its call is sent. An engine that dies
fails what it had; with `restart` another one takes its place.
"""

import asyncio
import os
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from ropeway.compiler.errors import RequestError
from ropeway.runtime.assembly import Assembly
from ropeway.runtime.engine.admission import Capacity, check_request
from ropeway.runtime.engine.messages import EngineStats, GenerationRequest, Update
from ropeway.runtime.engine_options import EngineOptions
from ropeway.runtime.sampling.structured import FIELD
from ropeway.runtime.text.tokenizer import Tokenizer
from ropeway.serving.errors import ApiError
from ropeway.serving.process.admission import Queue
from ropeway.serving.process.generation import (
    EngineGone,
    Generation,
    GenerationRecord,
    Submission,
)
from ropeway.serving.process.keeper import EngineKeeper, State
from ropeway.serving.process.link import EngineLink
from ropeway.serving.process.protocol import (
    Abort,
    Accepted,
    Add,
    AskStats,
    EngineInfo,
    FinishChoice,
    FromEngine,
    News,
    Rejected,
    Stats,
)
from ropeway.serving.process.supervisor import ENGINE_COMMAND
from ropeway.serving.settings import ServerSettings

T = TypeVar("T")

_THREADS = 2  # for tokenizing and templates; the cores are the engine's
_CONFIRM = 60.0  # seconds that a grammar may take, behind others
_STATS = 10.0  # seconds that the engine may take to answer


class EngineClient:
    """The only one who speaks to the engine."""

    def __init__(
        self,
        artifact: str | os.PathLike[str],
        options: EngineOptions,
        settings: ServerSettings,
        *,
        hang_seconds: float = 120.0,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        """Starts nothing yet. An engine that has work and reports no progress for `hang_seconds`
        counts as hung (0: never)."""
        self.on_request_end: list[Callable[[GenerationRecord], None]] = []
        self._hang_seconds = hang_seconds
        self._queue = Queue(settings.max_queued_requests)
        self._generations: dict[str, Generation] = {}
        self._unconfirmed: dict[str, asyncio.Future[None]] = {}
        self._asked: list[asyncio.Future[EngineStats]] = []
        self._count = 0
        self._pool = ThreadPoolExecutor(_THREADS, "text")
        self._keeper = EngineKeeper(
            artifact,
            options,
            settings,
            pool=self._pool,
            heard=self._hear,
            lost=self._fail_all,
            command=command,
        )

    # -- life -------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the engine's process now; needs no loop. It dies with the thread that calls this.

        Raises RunError.
        """
        self._keeper.launch()

    async def start(self) -> None:
        """Listen to the engine in this loop; launches it if that wasn't done. Raises RunError."""
        self._keeper.launch()
        self._keeper.attach()

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Return once requests are taken. Raises RunError or InputError with the engine's own
        words when it can't be, RunError after `timeout` seconds."""
        await self._keeper.wait_ready(timeout)

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        self._keeper.drain()

    async def close(self) -> None:
        """End everything: requests fail, the process goes, the sockets are removed."""
        self._fail_all("the server stops")
        await self._keeper.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- how it fares -----------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Where the engine is in its life."""
        return self._keeper.state

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, with the settings' chat template; None when it has none, and
        before the engine is ready."""
        return self._keeper.tokenizer

    @property
    def info(self) -> EngineInfo:
        """What was loaded. Raises ApiError 503 before it is known."""
        info = self._keeper.info
        if info is None:
            raise self._unavailable("the engine is still loading")
        return info

    @property
    def trouble(self) -> str | None:
        """Why nothing can be served now; None when it can (a drain still serves what runs)."""
        silent = time.monotonic() - self._keeper.last_heard
        if self._keeper.trouble is None and self._generations and 0 < self._hang_seconds < silent:
            return f"the engine has work but has made no progress for {silent:.0f} s"
        return self._keeper.trouble

    @property
    def open_requests(self) -> int:
        """Requests that haven't ended."""
        return len(self._generations)

    @property
    def open_choices(self) -> int:
        """Their choices."""
        return self._queue.open

    async def stats(self) -> EngineStats:
        """The engine's totals and state. Raises ApiError 503 when it can't say."""
        link = self._serving_link()
        answer: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        link.outbox.send(AskStats())
        try:
            async with asyncio.timeout(_STATS):
                return await answer
        except TimeoutError:
            raise self._unavailable(f"the engine said nothing for {_STATS:g} s") from None

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work`, which takes a while and no lock of the loop's, beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    # -- requests ---------------------------------------------------------------------------

    async def submit(
        self, requests: Sequence[Submission], *, streaming: bool = False
    ) -> list[Generation]:
        """Queue all of them, or none.

        Raises RequestError for one that can't be served, ApiError 429 when too many wait, ApiError
        503 when the engine isn't there.
        """
        link = self._serving_link()
        if self.state == "draining":
            raise self._unavailable("the server is about to stop")
        now = time.monotonic()
        assemblies = [self._assemble(requests, index, streaming) for index in range(len(requests))]
        messages = [self._encode(link, assembly.request) for assembly in assemblies]
        self._queue.enter(sum(one.params.n for one in requests), self.info.max_num_seqs, now)
        generations = [
            Generation(assembly, now, abort=self._abort, ended=self._ended)
            for assembly in assemblies
        ]
        if not self._generations:
            self._keeper.last_heard = now  # an idle engine says nothing, which is no hang
        for generation, message in zip(generations, messages, strict=True):
            self._generations[generation.request_id] = generation
            link.outbox.send_encoded(message)
        await self._confirm(generations)
        return generations

    def _encode(self, link: EngineLink, request: GenerationRequest) -> bytes:
        form = request.params.structured_outputs
        try:
            return link.outbox.encode(Add(self._lean(request), confirm=form is not None))
        except (UnicodeEncodeError, OverflowError, RecursionError) as error:
            # Everything else that is free text was checked.
            raise RequestError(FIELD, f"holds what no message can: {error}") from error

    async def _confirm(self, generations: Sequence[Generation]) -> None:
        """Wait until the engine has taken those whose grammar it compiles first; all are aborted
        when it refuses one, or the caller goes."""
        loop = asyncio.get_running_loop()
        waiting = {
            index: loop.create_future()
            for index, generation in enumerate(generations)
            if generation.params.structured_outputs is not None
        }
        if not waiting:
            return
        for index, answer in waiting.items():
            self._unconfirmed[generations[index].request_id] = answer
        confirmed = False
        try:
            async with asyncio.timeout(_CONFIRM):
                results = await asyncio.gather(*waiting.values(), return_exceptions=True)
            for index, result in zip(waiting, results, strict=True):
                if isinstance(result, RequestError) and len(generations) > 1:
                    raise RequestError(result.field, f"request {index}: {result.reason}")
                if isinstance(result, BaseException):
                    raise result
            confirmed = True
        except TimeoutError:
            raise self._unavailable(f"no grammar was compiled within {_CONFIRM:g} s") from None
        finally:
            if not confirmed:
                for generation in generations:
                    generation.abort()

    def _assemble(self, submissions: Sequence[Submission], index: int, streaming: bool) -> Assembly:
        given = submissions[index]
        self._count += 1
        request = GenerationRequest(
            request_id=str(self._count),
            prompt=tuple(given.prompt_ids),
            params=given.params,
            priority=given.priority,
            salt=given.salt,
        )
        try:
            check_request(request, self._capacity())
            return Assembly(request, given.prompt_text, self.tokenizer, streaming=streaming)
        except RequestError as error:
            if len(submissions) == 1:
                raise
            raise RequestError(error.field, f"request {index}: {error.reason}") from error

    def _capacity(self) -> Capacity:
        info = self.info
        return Capacity(info.vocab_size, info.max_model_len, info.capacity_tokens, info.eos_ids)

    def _lean(self, request: GenerationRequest) -> GenerationRequest:
        """The request as the engine needs it: stop strings are found here, and counts that no
        message can hold say no more than the model's own limits."""
        params, info = request.params, self.info
        lean = msgspec.structs.replace(
            params,
            stop=None,
            max_tokens=params.max_tokens and min(params.max_tokens, info.max_model_len),
            min_tokens=min(params.min_tokens, info.max_model_len),
            top_k=min(params.top_k, info.vocab_size),
        )
        return msgspec.structs.replace(request, params=lean)

    def _abort(self, request_id: str) -> None:
        self._say(Abort(request_id))

    def _say(self, message: msgspec.Struct) -> None:
        if self._keeper.link is not None:
            self._keeper.link.outbox.send(message)

    def _ended(self, generation: Generation) -> None:
        self._generations.pop(generation.request_id, None)
        self._queue.leave(generation.params.n, time.monotonic())
        refused = self._unconfirmed.pop(generation.request_id, None)
        if refused is not None:  # it never began
            _answer(refused, generation.error)
        elif self.on_request_end:
            record = generation.record()
            for callback in self.on_request_end:
                callback(record)

    def _serving_link(self) -> EngineLink:
        link = self._keeper.link
        if link is None or self.state not in ("ready", "draining"):
            raise self._unavailable(self._keeper.trouble or "the engine isn't there")
        return link

    def _unavailable(self, why: str) -> ApiError:
        return ApiError(
            503, why, kind="server_error", code="unavailable", headers={"Retry-After": "1"}
        )

    # -- what the engine says ---------------------------------------------------------------

    def _hear(self, message: FromEngine) -> None:
        match message:
            case News(updates):
                self._take_news(updates)
            case Stats(stats):
                answers, self._asked = self._asked, []
                for answer in answers:
                    if not answer.done():
                        answer.set_result(stats)
            case Accepted(request_id):
                _answer(self._unconfirmed.pop(request_id, None), None)
            case Rejected(request_id, field, reason):
                _answer(self._unconfirmed.get(request_id), RequestError(field, reason))
                generation = self._generations.get(request_id)
                if generation is not None:
                    error = ApiError(400, f"{field}: {reason}", param=field)
                    generation.fail(error, time.monotonic())

    def _take_news(self, updates: list[Update]) -> None:
        now = time.monotonic()
        for update in updates:
            generation = self._generations.get(update.request_id)
            if generation is None:
                continue  # it ended here while this was on its way
            try:
                found = generation.push(update, now)
            except Exception as error:  # one request's text mustn't cost another its news
                traceback.print_exc()
                generation.abort()
                message = f"{type(error).__name__}: {error}"
                generation.fail(ApiError(500, message, kind="server_error"), now)
                continue
            if found:
                self._say(FinishChoice(update.request_id, update.choice))

    def _fail_all(self, why: str) -> None:
        now = time.monotonic()
        for generation in list(self._generations.values()):
            generation.fail(EngineGone(why), now)
        answers, self._asked = self._asked, []
        for answer in answers:
            if not answer.done():
                answer.set_exception(EngineGone(why))


def _answer(waiting: "asyncio.Future[None] | None", error: Exception | None) -> None:
    if waiting is None or waiting.done():
        return
    if error is None:
        waiting.set_result(None)
    else:
        waiting.set_exception(error)

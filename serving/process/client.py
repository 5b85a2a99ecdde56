"""The engine as the HTTP process sees it: requests in, generations out, and how it fares.

Contract: lives in one asyncio loop. Whatever is submitted ends exactly once, whoever dies; a
request that can't be served is refused before anything of its call is sent. An engine that dies
fails what it had; with `restart` another one takes its place.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import msgspec
import zmq

from ropeway.compiler.errors import InputError, RequestError, RopewayError, RunError
from ropeway.runtime.assembly import Assembly
from ropeway.runtime.engine.admission import Capacity, check_request
from ropeway.runtime.engine.messages import EngineStats, GenerationRequest, Update
from ropeway.runtime.engine_options import EngineOptions
from ropeway.runtime.text.assets import TokenizerAssets
from ropeway.runtime.text.tokenizer import Tokenizer
from ropeway.serving.errors import ApiError
from ropeway.serving.process.admission import Queue
from ropeway.serving.process.generation import (
    EngineGone,
    Generation,
    GenerationRecord,
    Submission,
)
from ropeway.serving.process.link import EngineLink
from ropeway.serving.process.protocol import (
    Abort,
    Add,
    AskStats,
    EngineInfo,
    Failed,
    FinishChoice,
    FromEngine,
    News,
    Opened,
    Ready,
    Rejected,
    Stats,
)
from ropeway.serving.process.sockets import SocketFolder
from ropeway.serving.process.supervisor import ENGINE_COMMAND, Restarts
from ropeway.serving.settings import ServerSettings

State = Literal["starting", "ready", "draining", "restarting", "dead"]
T = TypeVar("T")

_THREADS = 2  # for tokenizing and templates; the cores are the engine's
_QUIT = 5.0  # seconds that an engine may take to end
_STATS = 10.0  # seconds that it may take to answer


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
        self.state: State = "starting"
        self.tokenizer: Tokenizer | None = None
        self.on_request_end: list[Callable[[GenerationRecord], None]] = []
        self._artifact = artifact
        self._options = options
        self._settings = settings
        self._command = command
        self._hang_seconds = hang_seconds
        self._heard = 0.0
        self._info: EngineInfo | None = None
        self._assets: TokenizerAssets | None = None
        self._failure: RopewayError | None = None
        self._link: EngineLink | None = None
        self._restarts = Restarts()
        self._queue = Queue(settings.max_queued_requests)
        self._generations: dict[str, Generation] = {}
        self._asked: list[asyncio.Future[EngineStats]] = []
        self._changed: list[asyncio.Future[None]] = []
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._pool = ThreadPoolExecutor(_THREADS, "text")

    # -- life -------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the engine's process now; needs no loop. It dies with the thread that calls this.

        Raises RunError.
        """
        if self._link is None:
            self._context: zmq.Context[Any] = zmq.Context()
            self._folder = SocketFolder()
            self._spawn()

    def _spawn(self) -> None:
        self._link = EngineLink(
            self._artifact,
            self._options,
            context=self._context,
            folder=self._folder,
            stream_interval=self._settings.stream_interval,
            command=self._command,
        )

    async def start(self) -> None:
        """Listen to the engine in this loop; launches it if that wasn't done. Raises RunError."""
        self.launch()
        self._attach()

    def _attach(self) -> None:
        if self._link is not None:
            self._heard = time.monotonic()
            self._link.attach(asyncio.get_running_loop(), self._hear, self._lost)

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Return once requests are taken. Raises RunError or InputError with the engine's own
        words when it can't be, RunError after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while self.state in ("starting", "restarting"):
                    changed = asyncio.get_running_loop().create_future()
                    self._changed.append(changed)
                    await changed
        except TimeoutError:
            raise RunError(f"the engine isn't ready after {timeout:g} s") from None
        if self.state == "dead":
            raise self._failure or RunError("the engine is closed")

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        if self.state != "dead":
            self._set_state("draining")

    async def close(self) -> None:
        """End everything: requests fail, the process goes, the sockets are removed."""
        if self._closed:
            return
        self._closed = True
        self._set_state("dead")
        for task in list(self._tasks):
            task.cancel()
        self._fail_all("the server stops")
        if self._link is not None:
            await self._link.quit(_QUIT)
            self._link = None
            self._folder.close()
            self._context.destroy(linger=0)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- how it fares -----------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What was loaded. Raises ApiError 503 before it is known."""
        if self._info is None:
            raise self._unavailable("the engine is still loading")
        return self._info

    @property
    def trouble(self) -> str | None:
        """Why nothing can be served now; None when it can."""
        if self.state == "dead":
            return str(self._failure) if self._failure else "the engine is closed"
        if self.state == "starting" or self._info is None:
            return "the engine is still loading"
        if self.state == "restarting":
            return f"the engine died and another one is loading: {self._failure}"
        silent = time.monotonic() - self._heard
        if self._generations and 0 < self._hang_seconds < silent:
            return f"the engine has work but has made no progress for {silent:.0f} s"
        return None

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
        self._serving_link()
        if self.state == "draining":
            raise self._unavailable("the server is about to stop")
        now = time.monotonic()
        assemblies = [self._assemble(requests, index, streaming) for index in range(len(requests))]
        link = self._serving_link()
        messages = [link.outbox.encode(Add(self._lean(a.request))) for a in assemblies]
        self._queue.enter(sum(request.params.n for request in requests), now)
        generations = [
            Generation(assembly, now, abort=self._abort, ended=self._ended)
            for assembly in assemblies
        ]
        if not self._generations:
            self._heard = now
        for generation, message in zip(generations, messages, strict=True):
            self._generations[generation.request_id] = generation
            link.outbox.send_encoded(message)
        return generations

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
        if self._link is not None and not self._closed:
            self._link.outbox.send(Abort(request_id))

    def _ended(self, generation: Generation) -> None:
        self._generations.pop(generation.request_id, None)
        self._queue.leave(generation.params.n, time.monotonic())
        if self.on_request_end:
            record = generation.record()
            for callback in self.on_request_end:
                callback(record)

    def _serving_link(self) -> EngineLink:
        if self._link is None or self.state not in ("ready", "draining"):
            raise self._unavailable(self.trouble or "the engine isn't there")
        return self._link

    def _unavailable(self, why: str) -> ApiError:
        return ApiError(
            503, why, kind="server_error", code="unavailable", headers={"Retry-After": "1"}
        )

    # -- what the engine says ---------------------------------------------------------------

    def _hear(self, message: FromEngine) -> None:
        self._heard = time.monotonic()
        match message:
            case News(updates):
                self._take_news(updates)
            case Opened(_, assets):
                self._assets = assets
            case Ready(info):
                self._start_task(self._become_ready(info))
            case Stats(stats):
                answers, self._asked = self._asked, []
                for answer in answers:
                    if not answer.done():
                        answer.set_result(stats)
            case Rejected(request_id, field, reason):
                generation = self._generations.get(request_id)
                if generation is not None:
                    generation.fail(ApiError(400, f"{field}: {reason}", param=field), self._heard)
            case Failed(text, bad_input):
                self._failure = InputError(text) if bad_input else RunError(text)

    def _take_news(self, updates: list[Update]) -> None:
        for update in updates:
            generation = self._generations.get(update.request_id)
            if generation is None:
                continue  # it ended here while this was on its way
            try:
                found = generation.push(update, self._heard)
            except Exception as error:
                generation.abort()
                generation.fail(
                    ApiError(500, f"{type(error).__name__}: {error}", kind="server_error"),
                    self._heard,
                )
                raise
            if found and self._link is not None:
                self._link.outbox.send(FinishChoice(update.request_id, update.choice))

    async def _become_ready(self, info: EngineInfo) -> None:
        try:
            assets = self._assets
            if assets is not None and self.tokenizer is None:
                self.tokenizer = await self.in_thread(Tokenizer.from_assets, assets)
        except RopewayError as error:
            self._die(error)
            return
        self._info = info
        self._queue.size(info.max_num_seqs)
        if self.state in ("starting", "restarting"):
            self._set_state("ready")

    def _lost(self) -> None:
        """The process has ended."""
        link, self._link = self._link, None
        if link is None:
            return
        words = link.process.last_words()
        link.close()
        failure = self._failure or RunError(f"the engine died ({words})")
        self._fail_all(str(failure))
        if self.state == "starting" or not self._settings.restart or self.state == "draining":
            self._die(failure)
            return
        delay = self._restarts.after_death(time.monotonic())
        if delay is None:
            self._die(
                RunError(
                    f"{failure}; it died more than {self._restarts.most} times within "
                    f"{self._restarts.window:g} s, so no other one is started"
                )
            )
            return
        self._failure = failure
        self._set_state("restarting")
        self._start_task(self._restart(delay))

    async def _restart(self, delay: float) -> None:
        await asyncio.sleep(delay)
        try:
            self._failure = None
            self._spawn()
            self._attach()
        except RopewayError as error:
            self._die(error)

    def _die(self, failure: RopewayError) -> None:
        self._failure = failure
        self._set_state("dead")

    def _fail_all(self, why: str) -> None:
        now = time.monotonic()
        for generation in list(self._generations.values()):
            generation.fail(EngineGone(why), now)
        answers, self._asked = self._asked, []
        for answer in answers:
            if not answer.done():
                answer.set_exception(EngineGone(why))

    def _set_state(self, state: State) -> None:
        self.state = state
        for changed in self._changed:
            if not changed.done():
                changed.set_result(None)
        self._changed.clear()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

"""Keeps an engine: starts it, learns when it can serve and when it died, starts another one.

Contract: one state at any moment, changed in the loop only. Whoever waits for requests is told of
a death before another engine is thought of.
"""

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import msgspec
import zmq

from ropeway.compiler.errors import InputError, RopewayError, RunError
from ropeway.runtime.engine_options import EngineOptions
from ropeway.runtime.text.assets import TokenizerAssets
from ropeway.runtime.text.tokenizer import Tokenizer
from ropeway.serving.process.link import EngineLink
from ropeway.serving.process.prestart import ENGINE_COMMAND
from ropeway.serving.process.protocol import EngineInfo, Failed, FromEngine, Opened, Ready
from ropeway.serving.process.sockets import SocketFolder
from ropeway.serving.process.supervisor import Restarts
from ropeway.serving.settings import ServerSettings

State = Literal["starting", "ready", "draining", "restarting", "dead"]

_QUIT = 2.0  # seconds that an engine may take to end


class EngineKeeper:
    """The engine's life; what it says of requests goes to `heard`, its death to `lost`."""

    def __init__(
        self,
        artifact: str | os.PathLike[str],
        options: EngineOptions,
        settings: ServerSettings,
        *,
        pool: ThreadPoolExecutor,
        heard: Callable[[FromEngine], None],
        lost: Callable[[str], None],
        command: Sequence[str] = ENGINE_COMMAND,
        child: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        """Starts nothing yet. `child` is a first process that waits for its setup; the tokenizer
        is made in `pool`."""
        self.state: State = "starting"
        self.info: EngineInfo | None = None
        self.tokenizer: Tokenizer | None = None
        self.link: EngineLink | None = None
        self.last_heard = 0.0  # by time.monotonic()
        self._artifact = artifact
        self._options = options
        self._settings = settings
        self._pool = pool
        self._on_heard = heard
        self._on_lost = lost
        self._command = command
        self._child = child
        self._context: zmq.Context[Any] | None = None
        self._folder: SocketFolder | None = None
        self._assets: TokenizerAssets | None = None
        self._making: asyncio.Future[Tokenizer] | None = None  # of those assets
        self._words: RopewayError | None = None  # with which this engine says that it ends
        self._failure: RopewayError | None = None  # why the last one is gone
        self._restarts = Restarts()
        self._waiters: list[asyncio.Future[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    # -- begin and end ----------------------------------------------------------------------

    def launch(self) -> None:
        """Start the engine's process now; needs no loop. It dies with the thread that calls this.

        Nothing happens when it was started. Raises RunError.
        """
        if self._context is not None:
            return
        self._folder = SocketFolder()
        self._context = zmq.Context()
        try:
            self._spawn(self._context, self._folder)
        except BaseException:
            self._release()
            raise

    def _spawn(self, context: "zmq.Context[Any]", folder: SocketFolder) -> None:
        self._words = None
        child, self._child = self._child, None
        self.link = EngineLink(
            self._artifact,
            self._options,
            context=context,
            folder=folder,
            stream_interval=self._settings.stream_interval,
            command=self._command,
            child=child,
        )

    def attach(self) -> None:
        """Listen to the engine in the running loop."""
        if self.link is not None:
            self.last_heard = time.monotonic()
            self.link.attach(asyncio.get_running_loop(), self._hear, self._ended)

    async def wait_ready(self, timeout: float | None) -> None:
        """See EngineClient.wait_ready."""
        try:
            async with asyncio.timeout(timeout):
                while self.state in ("starting", "restarting"):
                    waiter = asyncio.get_running_loop().create_future()
                    self._waiters.append(waiter)
                    await waiter
        except TimeoutError:
            raise RunError(f"the engine isn't ready after {timeout:g} s") from None
        if self.state == "dead":
            raise self._failure or RunError("the engine is closed")

    def drain(self) -> None:
        """From now on no other engine is started and nothing new is to be taken."""
        if self.state != "dead":
            self._set_state("draining")

    async def close(self) -> None:
        """End the process and remove what was made for it; a second call does nothing."""
        self._set_state("dead")
        for task in list(self._tasks):
            task.cancel()
        if self.link is not None:
            link, self.link = self.link, None
            await link.quit(_QUIT)
        self._release()

    def _release(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    # -- how it fares -----------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """Why nothing can be served, by the state alone; None when something can."""
        match self.state:
            case "dead":
                return str(self._failure) if self._failure else "the engine is closed"
            case "restarting":
                return f"another engine is loading, for the last one is gone: {self._failure}"
            case _:
                return "the engine is still loading" if self.info is None else None

    def _set_state(self, state: State) -> None:
        self.state = state
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    # -- what it says -----------------------------------------------------------------------

    def _hear(self, message: FromEngine) -> None:
        self.last_heard = time.monotonic()
        match message:
            case Opened(assets):
                self._make_tokenizer(assets)
            case Ready(info):
                self._start_task(self._become_ready(info))
            case Failed(text, bad_input):
                self._words = InputError(text) if bad_input else RunError(text)
            case _:
                self._on_heard(message)

    async def _become_ready(self, info: EngineInfo) -> None:
        try:
            self.tokenizer = None if self._making is None else await self._making
        except RopewayError as error:
            self._die(error)
            return
        self.info = info
        if self.state in ("starting", "restarting"):
            self._set_state("ready")

    def _make_tokenizer(self, assets: TokenizerAssets | None) -> None:
        """Begin it while the engine still loads; another engine's is mostly the same."""
        if assets == self._assets:
            return
        self._assets, self._making = assets, None
        if assets is None:
            return
        if self._settings.chat_template is not None:
            settings = msgspec.structs.replace(
                assets.settings, chat_template=self._settings.chat_template
            )
            assets = msgspec.structs.replace(assets, settings=settings)
        loop = asyncio.get_running_loop()
        self._making = loop.run_in_executor(self._pool, Tokenizer.from_assets, assets)

    # -- how it ends ------------------------------------------------------------------------

    def _ended(self) -> None:
        link, self.link = self.link, None
        if link is None:
            return
        words = link.process.last_words()
        link.close()
        failure = self._words or RunError(f"the engine died ({words})")
        if self.state in ("starting", "draining", "dead") or not self._settings.restart:
            self._die(failure)
        else:
            self._start_again(failure)
        self._on_lost(str(failure))

    def _start_again(self, failure: RopewayError) -> None:
        delay = self._restarts.after_death(time.monotonic())
        if delay is None:
            most, window = self._restarts.most, self._restarts.window
            self._die(
                RunError(
                    f"{failure}; engines died more than {most} times within {window:g} s, so no "
                    f"other one is started"
                )
            )
            return
        self._failure = failure
        self._set_state("restarting")
        self._start_task(self._restart(delay))

    async def _restart(self, delay: float) -> None:
        await asyncio.sleep(delay)
        try:
            if self._context is not None and self._folder is not None:
                self._spawn(self._context, self._folder)
                self.attach()
        except RopewayError as error:
            self._die(error)

    def _die(self, failure: RopewayError) -> None:
        self._failure = failure
        self._set_state("dead")

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

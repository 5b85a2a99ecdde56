"""The server's life: listen at once, say when the engine is ready, drain, end.

Contract: the port answers from the start (503 until the engine can serve). The first SIGTERM or
SIGINT drains: /ready turns 503, what runs may finish for `drain_timeout` seconds, the rest is
aborted; a second one ends everything at once. No process is left behind either way.
"""

import asyncio
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from ropeway.compiler.artifact.manifest import ModelInfo
from ropeway.compiler.artifact.reader import read_manifest
from ropeway.serving.http.app import build_app
from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.limits import limited
from ropeway.serving.http.log import Log, LogHandler
from ropeway.serving.http.metrics import Metrics
from ropeway.serving.http.routes import all_endpoints
from ropeway.serving.parsing.choose import chat_format
from ropeway.serving.settings import ServerSettings

if TYPE_CHECKING:
    from ropeway.serving.process.client import EngineClient
    from ropeway.serving.process.protocol import EngineInfo

_POLL = 0.05  # seconds between looks at what still runs in a drain
_LAST_WORDS = 2  # seconds for aborted requests to tell their clients
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STUCK = 300_000  # milliseconds that a client may take nothing before its connection is cut


class _Listener(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn."""
        yield

    @property
    def busy(self) -> int:
        """Requests that haven't been answered whole."""
        return len(self.server_state.tasks)


class HttpServer:
    """One server on a bound socket. `born`: when the command began, by time.monotonic()."""

    def __init__(self, context: ServerContext, bound: socket.socket, born: float) -> None:
        self._context = context
        self._socket = bound
        self._born = born
        self._received: list[int] = []
        self._stop = asyncio.Event()  # a signal came
        self._at_once = asyncio.Event()  # a second one

    async def run(self) -> int:
        """Serve until a signal; returns the exit code. Raises RopewayError when the engine can't
        be loaded."""
        self._set_up_process()
        listener = _Listener(self._config())
        serving = asyncio.create_task(listener.serve(sockets=[self._socket]))
        try:
            await self._context.client.start()
            loaded = asyncio.ensure_future(self._context.client.wait_ready(None))
            if await _first(loaded, self._stop.wait(), serving) is loaded:
                loaded.result()
                self._say_ready(self._context.client.info)
                await _first(self._stop.wait(), serving)
                await self._drain(listener)
        finally:
            await self._context.client.close()
            listener.force_exit = self._at_once.is_set()
            listener.should_exit = True
            await serving
        return 128 + self._received[-1] if self._at_once.is_set() else 0

    def _set_up_process(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        root = logging.getLogger()
        root.handlers = [LogHandler(self._context.log)]
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # anybody can make it warn
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if sys.platform == "linux":
            # Connections inherit it: whoever stops reading for good doesn't hold one for ever.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STUCK)

    def _config(self) -> uvicorn.Config:
        context = self._context
        return uvicorn.Config(
            build_app(context, all_endpoints()),
            http=limited(context.settings.max_header_bytes),
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=75,  # longer than proxies keep theirs: they mustn't lose a race
            timeout_graceful_shutdown=_LAST_WORDS,
        )

    def _on_signal(self, number: int) -> None:
        self._received.append(number)
        if self._stop.is_set():
            self._at_once.set()
        self._stop.set()

    async def _drain(self, listener: _Listener) -> None:
        context = self._context
        seconds = context.settings.drain_timeout
        context.client.drain()
        if listener.busy:
            context.log.info(
                f"draining: {listener.busy} requests may finish for {seconds:g} s; "
                f"a second signal ends them at once",
                requests=listener.busy,
            )
        end = time.monotonic() + seconds
        while listener.busy and time.monotonic() < end and not self._at_once.is_set():
            await asyncio.sleep(_POLL)
        if listener.busy:
            context.log.warning(f"{listener.busy} requests didn't finish: aborted")

    def _say_ready(self, info: "EngineInfo") -> None:
        log, settings = self._context.log, self._context.settings
        log.info(f"target {info.target}", step="target", device=info.device)
        log.info(
            f"{len(info.buckets)} buckets ready in {1e3 * info.load_seconds:.0f} ms",
            step="buckets",
            buckets=info.buckets,
            seconds=info.load_seconds,
        )
        log.info(
            f"{info.kv_blocks} KV blocks of {info.block_size} tokens, "
            f"{info.kv_bytes / 2**20:.0f} MiB; {info.max_num_seqs} sequences of at most "
            f"{info.max_model_len} tokens, {info.max_num_batched_tokens} tokens a step",
            step="cache",
            kv_blocks=info.kv_blocks,
            kv_bytes=info.kv_bytes,
        )
        names = ", ".join(self._context.model_names)
        access = "with an API key" if settings.api_keys else "without API keys"
        seconds = time.monotonic() - self._born
        address = url_of(self._socket)
        log.info(
            f"{address} serves {names} {access}, {1e3 * seconds:.0f} ms after the start",
            step="ready",
            address=address,
            models=self._context.model_names,
            seconds=round(seconds, 3),
        )


def run_server(
    artifact: Path,
    client: "EngineClient",
    settings: ServerSettings,
    bound: socket.socket,
    born: float,
) -> int:
    """Serve `artifact` with a launched engine until a signal; returns the exit code.

    Raises RopewayError when it can't be served.
    """

    async def serve() -> int:
        try:
            chat_format(settings, None)  # refuses a parser that doesn't exist
            context = _context(read_manifest(artifact).model, client, settings)
            return await HttpServer(context, bound, born).run()
        finally:
            await client.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve())


def _context(model: ModelInfo, client: "EngineClient", settings: ServerSettings) -> ServerContext:
    metrics = Metrics(model.max_model_len)
    client.on_request_end.append(metrics.count)
    return ServerContext(
        client=client,
        settings=settings,
        metrics=metrics,
        log=Log(as_json=settings.log_json),
        model_names=settings.served_model_name or (model.name,),
    )


async def _first(*things: Awaitable[Any]) -> "asyncio.Future[Any]":
    """The first that is done; coroutines of ours that weren't are cancelled."""
    tasks = {asyncio.ensure_future(thing): thing for thing in things}
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, thing in tasks.items():
        if task is not thing:
            task.cancel()
    return next(iter(done))


def url_of(bound: socket.socket) -> str:
    """Where a browser on this machine finds the server."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

"""Endpoints of a test's own, behind the real application and a real uvicorn, in this process."""

import asyncio
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn

from ropeway.serving.http.app import build_app
from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.endpoint import Endpoint
from ropeway.serving.http.limits import limited
from ropeway.serving.http.log import Log
from ropeway.serving.http.metrics import Metrics
from ropeway.serving.settings import ServerSettings


class NoEngine:
    """Stands for the engine's client where no engine is needed."""

    trouble = None
    state = "ready"

    async def in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """As the client does it."""
        return await asyncio.to_thread(work, *arguments)


class HttpApp:
    """A running application: its address, its log, its context and its loop."""

    def __init__(self, endpoints: Sequence[Endpoint], settings: ServerSettings) -> None:
        self.log = io.StringIO()
        client: Any = NoEngine()
        self.context = ServerContext(client, settings, Metrics(64), Log(stream=self.log), ("fake",))
        config = uvicorn.Config(
            build_app(self.context, endpoints),
            port=0,
            http=limited(settings.max_header_bytes),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> None:
        """Listen."""
        self._thread.start()
        for _ in range(500):
            if self._server.started:
                return
            self._thread.join(0.02)
        raise AssertionError("uvicorn didn't start")

    @property
    def port(self) -> int:
        """Where it listens, on 127.0.0.1."""
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    def stop(self) -> None:
        """End it."""
        self._server.force_exit = True
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()


@contextmanager
def http_app(endpoints: Sequence[Endpoint], **settings: Any) -> Iterator[HttpApp]:
    """It, for the length of a block."""
    app = HttpApp(endpoints, ServerSettings(**settings))
    app.start()
    try:
        yield app
    finally:
        app.stop()

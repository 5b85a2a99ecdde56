"""The page's files on a real server whose answers are scripted."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ropeway.runtime.engine.messages import EngineStats
from ropeway.serving.page.files import ENDPOINTS

Scripted = list[tuple[float, dict[str, Any] | str]] | Response
"""Seconds to wait, then a chunk to send as an event; or an answer of another kind."""


def delta(**values: Any) -> dict[str, Any]:
    """A chunk with news of the choice."""
    return {"choices": [{"index": 0, "delta": values, "finish_reason": None}]}


def ending(reason: str, tokens: int) -> list[tuple[float, dict[str, Any] | str]]:
    """The last chunks of an answer."""
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}}
    return [(0.0, last), (0.0, usage), (0.0, "[DONE]")]


def spoken(*texts: str, pause: float = 0.0) -> Scripted:
    """An answer of these pieces."""
    return [*((pause, delta(content=text)) for text in texts), *ending("stop", len(texts))]


def refused(status: int, message: str, **headers: str) -> Response:
    """An error object."""
    error = {"message": message, "type": "x", "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)


@dataclass
class PageServer:
    """What the page asked for, and what it is told. Change `stats` and `client` as you like."""

    port: int
    answers: list[Scripted] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    live_asked: int = 0
    gone: int = 0  # readers that left before the end
    stats: dict[str, int] = field(default_factory=dict)
    client: Any = None
    first_token: Any = None

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    def context(self) -> Any:
        """What the endpoints are given."""
        metrics = SimpleNamespace(first_token=self.first_token)
        return SimpleNamespace(client=self.client, metrics=metrics, model_name="tiny-model")

    async def take_stats(self) -> EngineStats:
        """Stands for EngineClient.stats."""
        self.live_asked += 1
        zero = {name: 0 for name in EngineStats.__struct_fields__}
        return EngineStats(**{**zero, "blocks_total": 1000, "block_size": 16, **self.stats})

    async def chat(self, request: Request) -> Response:
        """The next scripted answer."""
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        answer = self.answers.pop(0)
        if isinstance(answer, Response):
            return answer
        return StreamingResponse(self._events(answer), media_type="text/event-stream")

    async def _events(self, answer: list[tuple[float, Any]]) -> AsyncIterator[str]:
        done = False
        try:
            for wait, chunk in answer:
                await asyncio.sleep(wait)
                text = chunk if isinstance(chunk, str) else json.dumps(chunk)
                yield f"data: {text}\n\n"
            done = True
        finally:
            self.gone += not done


@contextmanager
def page_server() -> Iterator[PageServer]:
    """Run one in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    state = PageServer(listener.getsockname()[1])
    state.client = SimpleNamespace(state="ready", trouble=None, stats=state.take_stats)
    state.first_token = SimpleNamespace(count=0, total=0.0)

    def route(endpoint: Any) -> Route:
        async def answer(request: Request) -> Response:
            return await endpoint.handler(request, state.context())  # type: ignore[no-any-return]

        return Route(endpoint.path, answer, methods=[endpoint.method])

    chat = Route("/v1/chat/completions", state.chat, methods=["POST"])
    app = Starlette(routes=[*map(route, ENDPOINTS), chat])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield state
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        listener.close()

"""An endpoint: what is needed to route to it, to document it and to run it.

Contract: a handler returns an answer or raises. Whatever it raises becomes an OpenAI error object.
When the client goes away, at any moment, the handler or its stream is cancelled where it waits;
when the server's deadline passes, the client is told so.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ropeway.serving.errors import ApiError
from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.errors import (
    DeadlineError,
    as_api_error,
    error_answer,
    new_request_id,
    too_late,
)
from ropeway.serving.http.event_stream import EventStream

Answer = Response | EventStream
Handler = Callable[[Request, ServerContext], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path and what answers there.

    The msgspec types are for /openapi.json alone: the handler reads the body itself (`read_body`).
    `response_type` None: not JSON. `streams`: it can also answer with an event stream. `open`: it
    answers without an API key. `untagged` are structs of the request whose tag may be left out.
    """

    path: str
    method: Literal["GET", "POST"]
    handler: Handler
    summary: str
    request_type: Any = None
    response_type: Any = None
    streams: bool = False
    open: bool = False
    untagged: tuple[type, ...] = ()


class EndpointApp:
    """One endpoint as an ASGI application."""

    def __init__(self, endpoint: Endpoint, context: ServerContext) -> None:
        self._endpoint = endpoint
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the handler and send what it answers."""
        request_id = new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id
        connection = _Connection(receive)

        def explain(error: Exception) -> ApiError:
            if isinstance(error, DeadlineError):
                return too_late(limit)
            return as_api_error(error, self._context, request_id)

        limit = self._context.settings.request_timeout
        deadline = asyncio.get_running_loop().time() + limit if limit else None
        try:
            try:
                answer = await self._answer(Request(scope, connection.receive), deadline)
                answer.raw_headers.append((b"x-request-id", request_id.encode()))
                if isinstance(answer, EventStream):
                    answer.attach(explain, deadline)
                await answer(scope, receive, send)
            except Exception as error:
                await error_answer(explain(error), request_id)(scope, receive, send)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not connection.lost or task is None:
                raise
            task.uncancel()  # nobody is left to be answered
        finally:
            connection.close()

    async def _answer(self, request: Request, deadline: float | None) -> Answer:
        try:
            async with asyncio.timeout_at(deadline) as timer:
                return await self._endpoint.handler(request, self._context)
        except TimeoutError as error:
            if timer.expired():
                raise DeadlineError from error
            raise


class _Connection:
    """Watches the client: once the body has been read whole, the task that made this is cancelled
    when the client goes away. `lost` tells that from other cancellations."""

    def __init__(self, receive: Receive) -> None:
        self.lost = False
        self._receive = receive
        self._task = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        """The next part of the body, from a server that sends one part at least."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body") and not self._watcher:
            self._watcher = asyncio.create_task(self._watch())
        return message

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.lost = True
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """Stop watching."""
        if self._watcher is not None:
            self._watcher.cancel()

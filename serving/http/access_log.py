"""The log of requests: one line when an answer has been sent. Off by default."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ropeway.serving.http.context import ServerContext


class AccessLog:
    """ASGI middleware. A line names no query, body or key: they may be private."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._log = context.log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 0  # nothing was sent: the client went away first
        request_id = ""

        async def watched(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = (value for name, value in message["headers"] if name == b"x-request-id")
                request_id = next(ids, b"").decode()
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            seconds = time.monotonic() - began
            host = (scope.get("client") or ("?",))[0]
            method, path = scope["method"], scope["path"]
            outcome = f"{status or 'gone'} in {1e3 * seconds:.1f} ms"
            self._log.info(
                f"{host} {method} {path!r} {outcome} {request_id}",
                client=host,
                method=method,
                path=path,
                status=status,
                seconds=round(seconds, 6),
                request_id=request_id,
            )

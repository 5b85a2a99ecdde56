"""The application: endpoints, and around them keys, CORS and the log of requests."""

from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ropeway.serving.http.access_log import AccessLog
from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.endpoint import Endpoint, EndpointApp
from ropeway.serving.http.errors import error_answer, new_request_id, routing_error
from ropeway.serving.http.keys import KeyCheck


def build_app(context: ServerContext, endpoints: Iterable[Endpoint]) -> Starlette:
    """Endpoints that share a path differ in their method."""
    listed = list(endpoints)

    async def not_routed(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        answer = routing_error(error, request.method, request.url.path)
        return error_answer(answer, new_request_id())

    app = Starlette(
        routes=[Route(e.path, EndpointApp(e, context), methods=[e.method]) for e in listed],
        middleware=_middleware(context, listed),
        exception_handlers={HTTPException: not_routed},
    )
    app.router.redirect_slashes = False
    return app


def _middleware(context: ServerContext, endpoints: list[Endpoint]) -> list[Middleware]:
    settings = context.settings
    layers: list[Middleware] = []
    if settings.log_requests:
        layers.append(Middleware(AccessLog, context=context))
    if settings.cors_origins:
        from starlette.middleware.cors import CORSMiddleware  # noqa: PLC0415  (off by default)

        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    if settings.api_keys:
        open_paths = frozenset(e.path for e in endpoints if e.open)
        layers.append(Middleware(KeyCheck, keys=settings.api_keys, open_paths=open_paths))
    return layers

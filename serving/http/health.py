"""Whether the server lives, whether it takes requests, and which one it is."""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ropeway.compiler.version import VERSION
from ropeway.serving.errors import ApiError
from ropeway.serving.http.body import json_answer
from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.endpoint import Endpoint


class Health(msgspec.Struct, frozen=True):
    """An answer with status 200; anything else is an error object with status 503."""

    status: Literal["ok"] = "ok"


class Version(msgspec.Struct, frozen=True):
    """Ropeway's version."""

    version: str


async def health(request: Request, context: ServerContext) -> Response:
    """200 while requests are served, those of a drain included."""
    return _answer(context.client.trouble)


async def ready(request: Request, context: ServerContext) -> Response:
    """200 while new requests are taken: what a load balancer asks."""
    draining = context.client.state == "draining"
    return _answer("the server is about to stop" if draining else context.client.trouble)


def _answer(trouble: str | None) -> Response:
    if trouble is not None:
        raise ApiError(
            503, trouble, kind="server_error", code="unavailable", headers={"Retry-After": "1"}
        )
    return json_answer(Health())


async def version(request: Request, context: ServerContext) -> Response:
    """Which Ropeway this is."""
    return json_answer(Version(VERSION))


ENDPOINTS = [
    Endpoint(
        "/health", "GET", health, "Whether the engine serves.", response_type=Health, open=True
    ),
    Endpoint(
        "/ready", "GET", ready, "Whether requests are taken.", response_type=Health, open=True
    ),
    Endpoint("/ping", "GET", health, "The same as /health.", response_type=Health, open=True),
    Endpoint("/version", "GET", version, "The server's version.", response_type=Version, open=True),
]

"""Whatever went wrong, as an OpenAI error object. Tracebacks go to the log, never to a client."""

import secrets
import traceback

from starlette.exceptions import HTTPException
from starlette.responses import Response

from ropeway.compiler.errors import RequestError
from ropeway.serving.errors import ApiError, from_request_error
from ropeway.serving.http.body import json_answer
from ropeway.serving.http.context import ServerContext


def as_api_error(error: Exception, context: ServerContext, request_id: str) -> ApiError:
    """The answer that `error` stands for. What nobody foresaw becomes a 500 that carries the id
    under which the log has the rest."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return from_request_error(error)
    context.log.failure(
        f"request {request_id} failed: {type(error).__name__}: {error}",
        "".join(traceback.format_exception(error)),
    )
    return ApiError(
        500,
        f"internal error in request {request_id}: the server's log has the details",
        kind="server_error",
        code="internal_error",
    )


def new_request_id() -> str:
    """An id that a user can give to whoever reads the log."""
    return f"req_{secrets.token_hex(12)}"


def error_answer(error: ApiError, request_id: str) -> Response:
    """The HTTP answer."""
    answer = json_answer(error.body, error.status)
    answer.headers["x-request-id"] = request_id
    for name, value in error.headers.items():
        answer.headers[name] = value
    return answer


def routing_error(error: HTTPException, method: str, path: str) -> ApiError:
    """What the router couldn't place: a path or a method that doesn't exist."""
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return ApiError(
            405,
            f"{path} doesn't take {method}, but {allowed}",
            code="method_not_allowed",
            headers={"Allow": allowed},
        )
    if error.status_code == 404:
        return ApiError(404, f"there is no {path} here: see /openapi.json", code="not_found")
    return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))


class DeadlineError(TimeoutError):
    """The server's own deadline for a request has passed. A timer may fire a moment before its
    time, so that who asks the clock then isn't sure: who set the timer is."""


def too_late(seconds: float) -> ApiError:
    """The server's own deadline has passed."""
    return ApiError(
        504,
        f"the request took longer than the {seconds:g} s that this server allows",
        kind="timeout_error",
        code="deadline_exceeded",
    )

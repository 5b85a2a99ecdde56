"""JSON in and out: what a body may be, before anybody looks at its fields."""

import asyncio
import re
from itertools import accumulate
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ropeway.serving.errors import ApiError
from ropeway.serving.http.context import ServerContext

MAX_DEPTH = 128  # of arrays and objects; OpenAI's schemas may have 10 levels, each of about three
_READ_TIMEOUT = 60.0  # seconds that a client may be silent in the middle of its body
_LARGE = 256 << 10  # bytes; scanning more would hold up other streams

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_NO_BRACKET = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


class JsonAnswer(Response):
    """An answer whose body is JSON already."""

    media_type = "application/json"


def json_answer(value: Any, status: int = 200) -> JsonAnswer:
    """`value`, anything that msgspec can encode, as an answer."""
    return JsonAnswer(msgspec.json.encode(value), status)


async def read_body(request: Request, context: ServerContext) -> bytes:
    """The body of a request: JSON text whose encoding, size and depth are fit to be decoded.

    Raises ApiError: 415 for another content type, 413 for a body over the limit, 408 when the
    client stops in the middle, 400 for what isn't UTF-8, holds NUL or nests too deeply.
    """
    _check_type(request)
    body = await _receive(request, context.settings.max_body_bytes)
    if len(body) > _LARGE:
        await context.client.in_thread(check_text, body)
    else:
        check_text(body)
    return body


def check_text(body: bytes) -> None:
    """Raises ApiError 400 unless `body` is UTF-8 without NUL that nests at most MAX_DEPTH deep."""
    if not body:
        raise ApiError(400, "the body is empty: send a JSON object")
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise ApiError(400, f"the body isn't UTF-8: {where}") from error
    if b"\x00" in body or (b"\\u0000" in body and _NUL.search(body)):
        raise ApiError(400, "the body holds a NUL character")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        brackets = _STRING.sub(b"", body).translate(None, _NO_BRACKET)
        if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_DEPTH:
            raise ApiError(400, f"the body nests more than {MAX_DEPTH} arrays and objects")


def _check_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    # A browser sends other types across sites without asking this server first.
    if not (kind.startswith("application/") and kind.endswith(("/json", "+json"))):
        raise ApiError(
            415,
            f"the body's type is {given or 'unknown'}: send Content-Type: application/json",
            code="unsupported_media_type",
        )


async def _receive(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if len(declared) > len(str(limit)) or (declared.isdecimal() and int(declared) > limit):
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    stream = request.stream()
    try:
        while True:
            async with asyncio.timeout(_READ_TIMEOUT):
                part = await anext(stream, b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            if not part:
                return b"".join(parts)
            parts.append(part)
    except TimeoutError:
        message = f"no more of the body came for {_READ_TIMEOUT:g} s"
        raise ApiError(408, message, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(400, "the client went away") from None


def _too_large(limit: int) -> ApiError:
    # The connection stays: closing it while the client still writes could lose the answer.
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")

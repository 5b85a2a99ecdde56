"""API keys: Authorization: Bearer KEY, compared in a time that doesn't depend on the key."""

import hashlib
import hmac
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from ropeway.serving.errors import ApiError
from ropeway.serving.http.errors import error_answer, new_request_id


class KeyCheck:
    """Lets a request pass whose path is open or whose key is one of `keys`; others get a 401."""

    def __init__(self, app: ASGIApp, keys: Collection[str], open_paths: frozenset[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._known(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "a valid API key is needed: send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_answer(error, new_request_id())(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        if kind.lower() != b"bearer":
            return False
        digest = _digest(key.strip())
        # All are compared, so that the time doesn't tell which key it was.
        return any([hmac.compare_digest(digest, known) for known in self._digests])


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

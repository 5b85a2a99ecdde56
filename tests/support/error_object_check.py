"""A check for schemathesis, which loads this file: every error is an OpenAI error object."""

from typing import Any

import schemathesis

_MEMBERS = {"message", "type", "param", "code"}
_KINDS = {
    "invalid_request_error": range(400, 500),
    "rate_limit_error": range(429, 430),
    "authentication_error": range(401, 402),
    "server_error": range(500, 600),
    "timeout_error": range(504, 505),
}


@schemathesis.check
def openai_error_object(ctx: Any, response: Any, case: Any) -> None:
    """{"error": {message, type, param, code}}, and nothing of how the server is made."""
    if response.status_code < 400 or case.method == "HEAD":
        return
    assert response.headers.get("content-type") == ["application/json"], response.headers
    body = response.json()
    assert set(body) == {"error"}, body
    error = body["error"]
    assert set(error) == _MEMBERS, error
    assert isinstance(error["message"], str) and error["message"].strip(), error
    assert response.status_code in _KINDS[error["type"]], error
    for name in ("param", "code"):
        assert error[name] is None or isinstance(error[name], str), error
    for leak in ("Traceback", 'File "', "msgspec", "site-packages"):
        assert leak not in error["message"], error

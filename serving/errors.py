"""Errors as an OpenAI client sees them."""

from ropeway.compiler.errors import RequestError


class ApiError(Exception):
    """An answer that isn't a 2xx: becomes {"error": {message, type, param, code}} with `status`.

    `headers` go with it (Retry-After).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, object]:
        """The error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def from_request_error(error: RequestError) -> ApiError:
    """A bad value in a request: 400, with the field's name."""
    return ApiError(400, str(error), param=error.field)

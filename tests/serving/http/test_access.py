"""Who may ask: API keys and CORS."""

from pathlib import Path

import httpx
import pytest
from support.server import running_server

from ropeway.serving.errors import ApiError
from ropeway.serving.http.keys import KeyCheck

OPEN = ("/health", "/ready", "/ping", "/version", "/metrics", "/openapi.json", "/")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_keys(tiny_artifact: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the file\nfrom-file\n\n")
    options = ("--api-key", "one", "--api-key", "two", "--api-key-file", keys)
    with running_server(tiny_artifact, *options) as server, server.client() as http:
        for path in OPEN:
            assert http.get(path).status_code == 200, path
        refused: list[dict[str, str]] = [
            {},
            bearer("three"),
            bearer("on"),
            bearer("onee"),
            {"authorization": "Bearer"},
            {"authorization": "one"},
            {"authorization": "Basic one"},
            {"x-api-key": "one"},
        ]
        for headers in refused:
            answer = http.get("/v1/models", headers=headers)
            assert answer.status_code == 401, headers
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("one", "two", "from-file"):
            assert http.get("/v1/models", headers=bearer(key)).status_code == 200
        assert http.get("/v1/models", headers={"authorization": "bearer  one"}).status_code == 200
        # Paths that don't exist are nobody's business either.
        assert http.get("/nothing").status_code == 401
        assert http.post("/tokenize", content=b"x" * 3_000_000).status_code == 401
        assert http.get("/openapi.json").json()["components"]["securitySchemes"]
        log = server.text()
    assert "with an API key" in log
    assert "from-file" not in log


def test_keys_from_the_environment(tiny_artifact: Path) -> None:
    environment = {"ROPEWAY_API_KEY": "secret"}
    with running_server(tiny_artifact, environment=environment) as server, server.client() as http:
        assert http.get("/v1/models").status_code == 401
        assert http.get("/v1/models", headers=bearer("secret")).status_code == 200


def test_keys_are_compared_whole() -> None:
    check = KeyCheck(lambda *_: None, ("abc", "xyz"), frozenset())  # type: ignore[arg-type]
    for value, known in [(b"Bearer abc", True), (b"BEARER xyz", True), (b"Bearer abcd", False)]:
        assert check._known({"headers": [(b"authorization", value)]}) is known
    assert not check._known({"headers": []})


def test_no_cors_unless_asked_for(http: httpx.Client) -> None:
    answer = http.get("/health", headers={"origin": "https://example.com"})
    assert "access-control-allow-origin" not in answer.headers
    asked = {"origin": "https://example.com", "access-control-request-method": "POST"}
    assert http.options("/v1/completions", headers=asked).status_code == 405


def test_cors_for_one_origin(tiny_artifact: Path) -> None:
    options = ("--cors-origin", "https://example.com", "--api-key", "k")
    with running_server(tiny_artifact, *options) as server, server.client() as http:
        asked = {
            "origin": "https://example.com",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        answer = http.options("/v1/completions", headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://example.com"
        other = http.options("/v1/completions", headers=asked | {"origin": "https://other.com"})
        assert "access-control-allow-origin" not in other.headers
        # A page must be able to read why it was refused.
        refused = http.get("/v1/models", headers={"origin": "https://example.com"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://example.com"


@pytest.mark.parametrize("status", [401, 429, 503])
def test_an_error_is_an_error_object(status: int) -> None:
    error = ApiError(status, "why", param="p", code="c", kind="k")
    assert error.body == {"error": {"message": "why", "type": "k", "param": "p", "code": "c"}}

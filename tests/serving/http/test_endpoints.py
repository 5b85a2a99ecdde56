"""What isn't generation: health, models, tokenizing, metrics, the description."""

import httpx

from ropeway.compiler.version import VERSION


def test_health(http: httpx.Client) -> None:
    for path in ("/health", "/ready", "/ping"):
        answer = http.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert http.get("/version").json() == {"version": VERSION}

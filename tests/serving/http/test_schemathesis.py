"""Generated requests, right and wrong, against every endpoint of /openapi.json."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.server import RunningServer, is_running

PROGRAM = Path(sys.executable).with_name("schemathesis")
CANARY = {"prompt": "canary", "max_tokens": 16, "temperature": 0, "ignore_eos": True}

# A schema can't say all: an empty prompt, or two fields of which only one may be given, are 400s.
EXCLUDED = "positive_data_acceptance"


@pytest.mark.slow
def test_nothing_that_is_sent_breaks_it(
    server: RunningServer, http: httpx.Client, tmp_path: Path
) -> None:
    """No 5xx, no answer that isn't documented, nothing wrong accepted; NUL included. The engine
    lives on, and the same request still gives the same text."""
    [engine] = server.children()
    before = http.post("/v1/completions", json=CANARY).json()["choices"]
    options = ["--phases", "coverage,fuzzing", "--mode", "all", "--exclude-checks", EXCLUDED]
    options += ["--generation-allow-x00", "true", "--generation-deterministic", "--no-shrink"]
    options += ["-n", "10", "--request-timeout", "60", "--continue-on-failure", "--no-color"]
    options += ["--suppress-health-check", "all"]
    done = subprocess.run(
        [str(PROGRAM), "run", f"{server.url}/openapi.json", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "passed" in done.stdout
    assert is_running(engine)
    assert server.children() == [engine]
    assert http.post("/v1/completions", json=CANARY).json()["choices"] == before
    assert "Traceback" not in server.text()

"""Generated requests, right and wrong, at every endpoint, with canaries before, among and after."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.offline_answers import CHAT, TEXT, differences, offline_answers, served_answer
from support.server import RunningServer

from ropeway import LLM

PROGRAM = Path(sys.executable).with_name("schemathesis")
TESTS = Path(__file__).parents[2]
EXAMPLES = 10  # of each mode and endpoint, beside those of the coverage phase

# A schema can't say all: an empty prompt, or two fields of which only one may be given, are 400s.
EXCLUDED = "positive_data_acceptance"

CANARIES: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "a canary", "max_tokens": 16, "temperature": 0, "ignore_eos": True}),
    (TEXT, {"prompt": "a canary", "max_tokens": 16, "seed": 5, "n": 2, "stream": True}),
    (CHAT, {"messages": [{"role": "user", "content": "sing"}], "seed": 9, "max_tokens": 16}),
]


class Canaries(threading.Thread):
    """Ask for the same over and over; `wrong` says what wasn't as offline."""

    def __init__(self, server: RunningServer, offline: LLM) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._expected = offline_answers(offline, CANARIES)
        self._enough = threading.Event()
        self.rounds = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        with self._server.client() as http:
            while not self._enough.wait(0.2):
                self.one_round(http)

    def one_round(self, http: httpx.Client) -> None:
        """Each of them once."""
        self.rounds += 1
        for (path, body), right in zip(CANARIES, self._expected, strict=True):
            try:
                answer = http.post(path, json=body)
                found = served_answer(path, body, answer.content, body.get("n", 1))
                self.wrong += differences(right, found)
            except (httpx.HTTPError, AssertionError, ValueError) as error:
                self.wrong.append(f"{path}: {error!r}"[:500])

    def end(self) -> None:
        """Stop asking."""
        self._enough.set()
        self.join()


@pytest.mark.slow
def test_nothing_that_is_sent_breaks_it(
    server: RunningServer, http: httpx.Client, offline: LLM, tmp_path: Path
) -> None:
    """Positive and negative, coverage phase and NUL on. No 5xx, no answer that isn't documented,
    nothing wrong accepted, every error an OpenAI error object; the same engine lives on, holds
    nothing, and the canaries' answers never change."""
    [engine] = server.children()
    canaries = Canaries(server, offline)
    canaries.one_round(http)
    assert not canaries.wrong
    options = ["--phases", "coverage,fuzzing", "--mode", "all", "--exclude-checks", EXCLUDED]
    options += ["--generation-allow-x00", "true", "--generation-deterministic", "--no-shrink"]
    options += ["-n", str(EXAMPLES), "--request-timeout", "60", "--continue-on-failure"]
    options += ["--suppress-health-check", "all", "--no-color"]
    hooks = {"SCHEMATHESIS_HOOKS": "support.error_object_check", "PYTHONPATH": str(TESTS)}
    canaries.start()
    began = time.monotonic()
    done = subprocess.run(
        [str(PROGRAM), "run", f"{server.url}/openapi.json", *options],
        cwd=tmp_path,
        env={**os.environ, **hooks},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    seconds = time.monotonic() - began
    canaries.end()
    canaries.one_round(http)
    cases = re.search(r"(\d+) generated", done.stdout)
    print(f"{cases and cases[1]} cases in {seconds:.0f} s among {canaries.rounds} canary rounds")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert cases and int(cases[1]) > 1000, done.stdout[-3000:]
    assert not canaries.wrong, canaries.wrong[:5]
    assert canaries.rounds > 10
    assert server.children() == [engine], "the engine died"
    state = http.get("/live").json()["engine"]
    assert (state["running"], state["waiting"], state["blocks_used"]) == (0, 0, 0), state
    assert "Traceback" not in server.text(), server.text()[-4000:]

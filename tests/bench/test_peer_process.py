"""The link to an engine, with real processes: answers, failures, and nothing left behind."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.peers import process as link
from benchmarks.peers.errors import EngineError
from benchmarks.peers.noise import _of_sessions
from benchmarks.peers.process import EngineProcess
from benchmarks.peers.session import SessionProcess

PEERS = Path(__file__).parents[1] / "benchmarks"
ENGINE = """
import os, subprocess, sys, time
from peers.engines.serving import serve

class Toy:
    created = None
    def __init__(self, settings):
        if settings.model == "missing":
            raise FileNotFoundError("no model there")
        self.process = os.getpid()
        self.child = subprocess.Popen(["sleep", "60"])
        print("libraries print what they like")
        self.ballast = b"x" * (settings.longest << 20)
    def generate(self, prompts, new):
        if new == 13:
            print("a last word", file=sys.stderr, flush=True)
            os._exit(3)
        if new == 14:
            return [[1] for _ in prompts]
        if new == 15:
            time.sleep(60)
        return [[sum(prompt)] * new for prompt in prompts]
    def close(self):
        pass

serve(Toy)
"""
SETTINGS = {"model": "toy", "threads": 1, "longest": 64, "requests": 2}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    """A toy engine in a process, not loaded."""
    variables = os.environ | {"PYTHONPATH": str(PEERS)}
    started = EngineProcess([sys.executable, "-c", ENGINE], variables, tmp_path / "toy.log")
    yield started
    started.kill()


def alive(session: int) -> list[int]:
    """Processes of a session that haven't ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def ended(session: int) -> bool:
    """Whether no process of a session is alive; a killed one may take a moment to die."""
    deadline = time.monotonic() + 10
    while alive(session) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(session)


def test_it_loads_generates_and_tells_its_memory(engine: EngineProcess) -> None:
    loaded = engine.load(SETTINGS)
    assert 0 < loaded < 60
    assert 0 <= engine.generate([[1, 2], [3]], 4) < 10
    assert engine.first_token([1]) > loaded
    assert 64 < engine.peak_mib() < 400
    assert len(alive(engine.session)) == 2
    engine.close()
    assert ended(engine.session)


@pytest.mark.parametrize(
    ("new", "message"),
    [(13, r"ended with code 3: a last word"), (14, r"asked for 14 tokens to 1 prompts, got \[1\]")],
)
def test_what_goes_wrong_is_said(engine: EngineProcess, new: int, message: str) -> None:
    engine.load(SETTINGS)
    with pytest.raises(EngineError, match=message):
        engine.generate([[1]], new)


def test_an_error_while_loading_is_the_engines_own(engine: EngineProcess) -> None:
    with pytest.raises(EngineError, match="FileNotFoundError: no model there"):
        engine.load(SETTINGS | {"model": "missing"})


def test_an_engine_that_hangs_is_given_up(
    engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.load(SETTINGS)
    monkeypatch.setattr(link, "ANSWER_LIMIT_S", 0.2)
    with pytest.raises(EngineError, match="generate: no answer in 0 s"):
        engine.generate([[1]], 15)
    engine.kill()
    assert ended(engine.session)


def test_a_stopped_engine_computes_nothing_and_can_be_ended(engine: EngineProcess) -> None:
    engine.load(SETTINGS)
    engine.stop()
    time.sleep(0.05)
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
              for pid in alive(engine.session)]  # fmt: skip
    assert states == ["T", "T"]
    engine.resume()
    assert engine.generate([[1]], 2) >= 0
    engine.stop()
    engine.kill()
    assert ended(engine.session)


def test_an_engines_own_time_is_no_noise(engine: EngineProcess) -> None:
    """Loading fills 64 MiB, which takes CPU time; it isn't others' time."""
    before = sum(_of_sessions({engine.session}))
    engine.load(SETTINGS)
    assert sum(_of_sessions({engine.session})) > before
    assert _of_sessions(set()) == []


_BURNING_CHILD = """
import subprocess, sys
burn = "import time\\nwhile time.process_time() < 0.3: pass\\ntime.sleep(60)"
subprocess.run([sys.executable, "-c", burn], start_new_session=True)
"""


def test_a_childs_time_counts_in_whatever_session_it_is(tmp_path: Path) -> None:
    """As a server's engine, which a Ctrl-C for the server mustn't reach."""
    parent = SessionProcess([sys.executable, "-c", _BURNING_CHILD], os.environ, tmp_path / "log")
    try:
        deadline = time.monotonic() + 20
        while sum(_of_sessions({parent.session})) < 0.3 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert sum(_of_sessions({parent.session})) >= 0.3
        assert len(_of_sessions({parent.session})) == 2
    finally:
        [child] = Path(f"/proc/{parent.session}/task/{parent.session}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        parent.kill()

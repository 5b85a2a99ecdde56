"""Figures under load: requests that arrive while others decode, and a busy neighbour."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ropeway.compiler.cli.main import main
from ropeway.compiler.errors import RunError
from ropeway.runtime.bench.arrivals import (
    ArrivalFigures,
    Waits,
    make_arrivals,
    measure_arrivals,
)
from ropeway.runtime.bench.neighbour import beside_neighbour, busy_neighbour
from ropeway.runtime.bench.quiet import Sampler
from ropeway.runtime.bench.workload import Workload
from ropeway.runtime.engine_options import EngineOptions
from ropeway.runtime.loader import Engine, load_engine


@pytest.fixture
def engine(tiny_program: Path) -> Iterator[Engine]:
    engine = load_engine(tiny_program, EngineOptions(num_threads=1, enable_prefix_caching=False))
    yield engine
    engine.close()


def gone(pid: int) -> bool:
    """Whether the process ends within some seconds."""
    for _ in range(500):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_requests_are_mixed_and_come_one_group_after_the_other() -> None:
    arrivals = make_arrivals(49152, 8192)
    assert len(arrivals) == 64
    assert [one.step for one in arrivals[:16]] == [0] * 16
    later = [one.step for one in arrivals[16:]]
    assert later == sorted(later)
    assert {later.count(step) for step in later} == {1, 2, 4, 8}
    lengths = sorted(len(one.prompt) for one in arrivals)
    assert 32 <= lengths[0] < 128 < lengths[32] < 512 < lengths[-1] < 1024
    assert make_arrivals(49152, 8192) == arrivals
    short = make_arrivals(97, 64)
    assert all(len(one.prompt) + one.new <= 64 for one in short)
    assert all(0 <= token < 97 for one in short for token in one.prompt)


def test_every_token_but_the_first_was_waited_for(engine: Engine) -> None:
    arrivals = make_arrivals(engine.core.vocab_size, 160)
    found = measure_arrivals(engine.core, arrivals)
    assert found.decode.count + found.mixed.count == sum(one.new - 1 for one in arrivals)
    assert found.mixed.count > 0
    assert found.budget_tokens == 64
    assert found.budget_step_ms > 0
    for waits in (found.decode, found.mixed):
        assert 0 < waits.median <= waits.p99 <= waits.max
    assert not engine.core.has_work
    assert engine.core.stats().blocks_used == 0


def test_the_longest_wait_is_held_against_the_budget() -> None:
    decode = Waits.of([1.0, 2.0, 3.0])
    assert decode.figures == [2.0, 2.98, 3.0]
    mixed = Waits.of([30.0])
    assert ArrivalFigures(64, 20.0, decode, mixed, 1.0).over_budget == 1.5
    assert ArrivalFigures(64, 20.0, mixed, decode, 1.0).over_budget == 1.5
    assert Waits.of([]).count == 0


def test_a_neighbour_keeps_its_core_busy_and_ends_with_the_block() -> None:
    with busy_neighbour(30) as pid:
        core = max(os.sched_getaffinity(0))
        assert os.sched_getaffinity(pid) == {core}
        before = _cpu_ticks(pid)
        time.sleep(0.5)
        assert _cpu_ticks(pid) > before
    assert gone(pid)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_neighbour_ends_when_the_block_fails(error: type[BaseException]) -> None:
    with pytest.raises(error), busy_neighbour(30) as pid:
        raise error
    assert gone(pid)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_neighbour_ends_with_its_parent(sent: signal.Signals) -> None:
    code = (
        "import time\n"
        "from ropeway.runtime.bench.neighbour import busy_neighbour\n"
        "with busy_neighbour(60) as pid:\n"
        "    print(pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(sent)
    assert gone(pid)


def test_a_neighbour_whose_time_is_up_is_no_silent_success() -> None:
    with pytest.raises(RunError, match="ended before the work"), busy_neighbour(0.05) as pid:
        assert gone(pid)
    assert gone(pid)


def test_rates_beside_a_neighbour_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "_wait_until_idle", lambda self: None)
    monkeypatch.setattr("ropeway.runtime.bench.quiet._others_seconds", lambda: 0.0)
    rates = iter([100.0, 110.0, 90.0, 40.0, 50.0, 60.0])
    found = beside_neighbour(lambda: next(rates), Sampler(3, lambda what: None))
    assert found == {
        "quiet_tok_s": [100.0, 90.0, 110.0],
        "busy_tok_s": [50.0, 40.0, 60.0],
        "busy_over_quiet": 0.5,
    }


def test_the_command_prints_the_figures(
    tiny_program: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Sampler, "_wait_until_idle", lambda self: None)
    file = tmp_path / "w.json"
    work = Workload(
        gen=6, single=[1], prefill1024=[1] * 9, batch8=[[1]] * 8, batch32=[[3, 4]] * 32, server=[]
    )
    file.write_bytes(msgspec.json.encode(work))
    options = ["--load", "--samples", "1", "--threads", "1", "--workload", str(file), "--json"]
    assert main(["bench", str(tiny_program), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mixed_step_max_over_budget"][0] > 0
    assert found["budget_tokens"] == 64
    assert len(found["arrivals_mixed_wait_ms"]) == 3
    ratio = found["batch32_busy_tok_s"][0] / found["batch32_quiet_tok_s"][0]
    assert found["batch32_busy_over_quiet"] == pytest.approx(ratio, abs=1e-3)
    assert "decode_b1_tok_s" not in found  # the suite wasn't asked for
    assert found["threads"] == 1


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])

"""The thread team: every rank runs once per job, waits block, a busy neighbour is borne."""

import ctypes
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support.cpu_programs import FAST, WIDE, logits_of, step_of

from ropeway.compiler.errors import RunError
from ropeway.runtime.devices.cpu import native
from ropeway.runtime.devices.cpu.native import Team

TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_runs_once_per_job(size):
    seen: list[tuple[int, int]] = []
    task = TASK(lambda _, rank, count: seen.append((rank, count)))
    address = ctypes.cast(task, ctypes.c_void_p).value or 0
    with Team(size) as team:
        for job in range(1, 30):
            team.run(address, 0)
            assert sorted(seen[-size:]) == [(rank, size) for rank in range(size)]
            assert len(seen) == job * size


@pytest.fixture
def every_core():
    """All cores, though a test process may have been given one of its own."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    yield os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)


def _cores_of_ranks(size: int) -> dict[int, set[int]]:
    """The cores that each rank may run on while a job runs."""
    seen: dict[int, set[int]] = {}
    task = TASK(lambda _, rank, __: seen.update({rank: os.sched_getaffinity(0)}))
    with Team(size) as team:
        team.run(ctypes.cast(task, ctypes.c_void_p).value or 0, 0)
    return seen


def test_a_team_of_every_core_keeps_its_threads_apart(every_core):
    """Each worker has one core of its own; the caller stays free, also afterwards."""
    usable = every_core
    if len(usable) < 2:
        pytest.skip("one core leaves nothing to choose")
    seen = _cores_of_ranks(len(usable))
    workers = [seen[rank] for rank in range(1, len(usable))]
    assert all(len(cores) == 1 for cores in workers)
    assert len(set.union(*workers)) == len(workers)
    assert seen[0] == usable == os.sched_getaffinity(0)


def test_a_team_that_leaves_cores_free_is_not_pinned(every_core, monkeypatch):
    """Another team, of this process or another, must not end up on the same cores."""
    usable = every_core
    assert _cores_of_ranks(len(usable) + 1) == dict.fromkeys(range(len(usable) + 1), usable)
    monkeypatch.setenv("ROPEWAY_PIN", "off")
    assert _cores_of_ranks(len(usable)) == dict.fromkeys(range(len(usable)), usable)
    monkeypatch.setenv("ROPEWAY_PIN", "maybe")
    with pytest.raises(RunError, match="ROPEWAY_PIN='maybe'"):
        Team(2)


def test_threads_sleep_between_jobs():
    """Idle threads block instead of spinning: a second of waiting costs almost no CPU time."""
    task = TASK(lambda *_: None)
    with Team(3) as team:
        team.run(ctypes.cast(task, ctypes.c_void_p).value or 0, 0)
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.2


def test_a_waiting_thread_blocks_while_another_works():
    """One slow rank: the others wait for it at the barrier without burning their cores."""
    task = TASK(lambda _, rank, __: time.sleep(0.5) if rank == 0 else None)
    with Team(4) as team:
        before = time.process_time()
        team.run(ctypes.cast(task, ctypes.c_void_p).value or 0, 0)
        assert time.process_time() - before < 0.25


def test_steps_with_a_busy_neighbour_slow_down_by_its_share_only(load):
    """A spinning barrier alone made steps 100 times slower once another process took a core."""
    device = load(FAST, threads=len(os.sched_getaffinity(0)))
    inputs = step_of([([1, 2, 3], 3)])

    def median(count: int = 40) -> float:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            logits_of(device, WIDE[-1], inputs)
            times.append(time.perf_counter() - start)
        return float(np.median(times))

    alone = median()
    busy = "import time\nend = time.time() + 20\nwhile time.time() < end: pass"
    neighbour = subprocess.Popen([sys.executable, "-c", busy])
    try:
        time.sleep(0.3)
        assert median() < max(30 * alone, 0.05)
    finally:
        neighbour.kill()
        neighbour.wait()


def test_teams_of_two_threads_run_beside_each_other():
    counts = [0, 0]

    def drive(number: int) -> None:
        def count(_: int, rank: int, __: int) -> None:
            counts[number] += rank == 0

        task = TASK(count)
        with Team(2) as team:
            for _ in range(200):
                team.run(ctypes.cast(task, ctypes.c_void_p).value or 0, 0)

    threads = [threading.Thread(target=drive, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == [200, 200]


def test_read_sums_every_word():
    data = np.arange(4096, dtype=np.uint64)
    for size in (1, 2):
        with Team(size) as team:
            assert team.read(data) == int(data.sum())


def test_threads_that_do_not_start_are_reported(monkeypatch):
    class NoThreads:
        def rw_team_create(self, size: int, pin: int) -> None:
            return None

    monkeypatch.setattr(native, "load_library", NoThreads)
    with pytest.raises(RunError, match="can't start 4 threads: lower num_threads"):
        Team(4)


def test_a_forked_child_is_told_instead_of_hanging(load):
    """Threads don't survive a fork: the child would wait at the first barrier for ever."""
    device = load(FAST, threads=2)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            logits_of(device, WIDE[-1], step_of([([1, 2], 2)]))
            os.write(writer, b"ran")
        except RunError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        assert b"threads weren't copied: load it in the child" in pipe.read()

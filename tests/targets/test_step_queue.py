"""The CPU's queue of steps: what one draws feeds the next, and whatever fails stays its own."""

import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from msgspec.structs import replace
from support.cpu_programs import FAST, WIDE, step_of

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import RunError
from ropeway.runtime.devices.base import StepJob
from ropeway.runtime.devices.cpu.device import CpuDevice
from ropeway.runtime.sampling.batch import RowSettings, SampleBatch, SlotReset, WantedRow
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.runtime.step_queue import InlineQueue

IDS = np.random.default_rng(5).integers(0, FAST.vocab, 150).tolist()
GREEDY = SamplingParams(temperature=0)
PENALIZED = SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.4, presence_penalty=0.5)


def batch_of(params: list[SamplingParams], position: int, resets: list[SlotReset] = ()):
    return SampleBatch.build(
        [
            WantedRow(
                RowSettings.of(one, vocab_size=FAST.vocab, seed=one.seed or 0, request=f"r{row}"),
                row,
                position,
                slot=row,
            )
            for row, one in enumerate(params)
        ],
        resets,
    )


def prefill(count: int, params: list[SamplingParams], resets: list[SlotReset] = ()) -> StepJob:
    """`count` sequences of 20 tokens; the last row of each is drawn from."""
    inputs = step_of(
        [(IDS[n : n + 20], 20) for n in range(count)], rows=[20 * n + 19 for n in range(count)]
    )
    return StepJob(WIDE[-1], inputs, batch_of(params, 20, resets))


def decode(step: int, params: list[SamplingParams], feed: list[int] | None) -> StepJob:
    """The step after `step` decoded tokens; ids are wrong where they are to be fed."""
    count = len(params)
    inputs = step_of([(IDS[n : n + 21 + step], 1) for n in range(count)])
    ids = np.full(count, FAST.vocab + 5, np.int32)
    fed = None if feed is None else np.array(feed, np.int32)
    return StepJob(WIDE[3], replace(inputs, ids=ids), batch_of(params, 21 + step), feed=fed)


def job_list(count: int, params: list[SamplingParams], steps: int) -> list[StepJob]:
    resets = [SlotReset(n, IDS[n : n + 20]) for n in range(count) if params[n].uses_penalties]
    order = list(range(count))
    return [prefill(count, params, resets), *(decode(s, params, order) for s in range(steps))]


@pytest.fixture
def expected(load):
    """The tokens by the device's own calls, one after another."""
    queue = InlineQueue(load(FAST))
    jobs = job_list(4, [GREEDY, PENALIZED, GREEDY, PENALIZED], 6)
    return [queue.wait(queue.enqueue(job)).tokens.tolist() for job in jobs]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_fed_steps_draw_what_steps_one_by_one_draw(load, expected, threads, ahead) -> None:
    queue = load(FAST, threads).open_queue()
    jobs = job_list(4, [GREEDY, PENALIZED, GREEDY, PENALIZED], 6)
    tickets, found = [], []
    for number, job in enumerate(jobs):
        tickets.append(queue.enqueue(job))
        if number >= ahead - 1:
            found.append(queue.wait(tickets[len(found)]).tokens.tolist())
    while len(found) < len(jobs):
        found.append(queue.wait(tickets[len(found)]).tokens.tolist())
    assert found == expected


def test_rows_are_fed_in_any_order_and_beside_known_ids(load, expected) -> None:
    queue = load(FAST).open_queue()
    params = [GREEDY, PENALIZED, GREEDY, PENALIZED]
    first, plain = job_list(4, params, 1)
    swap = [2, 0, -1]
    inputs = step_of([(IDS[n : n + 21], 1) for n in (2, 0, 3)], width=6)
    tables = [plain.inputs.block_tables[0][[2, 0, 3]]]
    slots = [plain.inputs.slots[0][[2, 0, 3]]]
    ids = np.array([-9, -9, expected[0][3]], np.int32)
    inputs = replace(inputs, ids=ids, slots=slots, block_tables=tables)
    job = StepJob(WIDE[3], inputs, batch_of([GREEDY] * 3, 21), feed=np.array(swap, np.int32))
    queue.enqueue(first)
    ticket = queue.enqueue(job)
    queue.wait(1)
    found = queue.wait(ticket).tokens.tolist()
    assert found[:2] == [expected[1][2], expected[1][0]]
    assert job.inputs.ids.tolist() == ids.tolist()  # what was handed over stays as it was


def test_a_failed_draw_feeds_nothing_and_keeps_nothing(load, expected) -> None:
    """Every token of the second sequence is banned, so its draw fails."""
    device = load(FAST)
    params = [GREEDY, GREEDY, GREEDY, PENALIZED]
    first, second = job_list(4, params, 1)
    early = SamplingParams(temperature=0, min_tokens=9, max_tokens=10)
    settings = replace(
        RowSettings.of(early, vocab_size=FAST.vocab, seed=0, request="sick"),
        banned=np.arange(FAST.vocab, dtype=np.int32),
    )
    wanted = [
        WantedRow(
            settings if n == 1 else RowSettings.of(p, vocab_size=FAST.vocab, seed=p.seed or 0),
            n,
            20,
            slot=n,
        )
        for n, p in enumerate(params)
    ]
    first = replace(first, batch=SampleBatch.build(wanted, first.batch.resets))
    caches = device.loaded.caches
    caches.fill(b"\xff")  # NaN: who reads what nobody wrote shows it
    queue = device.open_queue()
    tickets = [queue.enqueue(first), queue.enqueue(second)]
    one, two = queue.wait(tickets[0]), queue.wait(tickets[1])
    assert one.tokens[1] == -1 and [f.request for f in one.faults] == ["sick"]
    for row in (0, 2, 3):
        assert (one.tokens[row], two.tokens[row]) == (expected[0][row], expected[1][row])
    assert [fault.index for fault in two.faults] in ([], [1])
    slot = int(second.inputs.slots[0][1])
    assert not wrote(device, slot) and wrote(device, int(second.inputs.slots[0][0]))


def wrote(device: CpuDevice, slot: int) -> bool:
    """Whether the first layer has a key in a slot; a block's first token zeroes the others'."""
    caches = device.loaded.caches
    plane = device.loaded.template.caches[0]
    block, offset = divmod(slot, 32)
    start = block * caches.block_bytes + caches.key_offsets[0]
    rows = plane.heads * (-(-plane.key_dim // 32) * 32)
    raw = caches._region.bytes[start : start + rows * 32 * 4].view(np.float32)
    return bool(raw.reshape(rows, 32)[:, offset].any())


@pytest.mark.parametrize(
    ("feed", "message"), [([0, 1, 2, 4], r"feed\[3\].* is 4"), ([0, 1, 2], "4 ids with a feed")]
)
def test_a_feed_outside_the_step_before_is_refused(load, feed, message) -> None:
    queue = load(FAST).open_queue()
    first, second = job_list(4, [GREEDY] * 4, 1)
    queue.enqueue(first)
    with pytest.raises(RunError, match=message):
        queue.wait(queue.enqueue(replace(second, feed=np.array(feed, np.int32))))


def test_nothing_feeds_the_first_step_or_one_after_a_step_without_draws(load) -> None:
    queue = load(FAST).open_queue()
    first, second = job_list(2, [GREEDY] * 2, 1)
    with pytest.raises(RunError, match=r"feed\[0\]"):
        queue.wait(queue.enqueue(second))
    silent = replace(first, batch=None)
    assert queue.wait(queue.enqueue(silent)) is None
    with pytest.raises(RunError, match=r"feed\[0\]"):
        queue.wait(queue.enqueue(second))


def test_a_step_that_fails_stops_those_behind_it_and_no_later_one(load, expected) -> None:
    queue = load(FAST).open_queue()
    params = [GREEDY, PENALIZED, GREEDY, PENALIZED]
    first, second, third, *_ = job_list(4, params, 3)
    far = replace(first.inputs, positions=first.inputs.positions + FAST.positions)
    tickets = [queue.enqueue(job) for job in (replace(first, inputs=far), second, third)]
    with pytest.raises(RunError, match="positions"):
        queue.wait(tickets[0])
    for ticket in tickets[1:]:
        with pytest.raises(RunError, match="one before it failed"):
            queue.wait(ticket)
    tickets = [queue.enqueue(job) for job in (first, second)]
    assert [queue.wait(t).tokens.tolist() for t in tickets] == expected[:2]


def test_blocks_are_copied_before_the_step_that_asks_for_it(load, expected) -> None:
    """The decode step reads copies of the blocks that the prefill wrote just before it."""
    queue = load(FAST).open_queue()
    params = [GREEDY, PENALIZED, GREEDY, PENALIZED]
    first, second = job_list(4, params, 1)
    sources = second.inputs.block_tables[0][:, 0]
    moved = second.inputs.block_tables[0].copy()
    moved[:, 0] = [31, 32, 33, 34]
    copies = list(zip(sources.tolist(), [31, 32, 33, 34], strict=True))
    slots = moved[:, 0] * 32 + second.inputs.slots[0] % 32
    inputs = replace(second.inputs, block_tables=[moved], slots=[slots.astype(np.int32)])
    tickets = [queue.enqueue(first), queue.enqueue(replace(second, inputs=inputs, copies=copies))]
    assert [queue.wait(t).tokens.tolist() for t in tickets] == expected[:2]


def test_jobs_that_cannot_run_are_refused_when_they_are_queued(load) -> None:
    queue = load(FAST).open_queue()
    job = prefill(2, [GREEDY] * 2)
    with pytest.raises(RunError, match="no bucket decode-16"):
        queue.enqueue(replace(job, bucket=Bucket("decode", 16, 16, 16)))
    with pytest.raises(RunError, match="2 rows in bucket decode-1, which takes 1"):
        queue.enqueue(replace(job, bucket=WIDE[0]))
    with pytest.raises(RunError, match="there are blocks"):
        queue.enqueue(replace(job, copies=[(1, 4000)]))
    for _ in range(4):
        queue.enqueue(job)
    queue.drain()
    for ticket in range(1, 5):
        assert queue.wait(ticket) is not None
    assert queue.enqueue(job) == 5


def test_more_jobs_than_it_holds_are_refused(load) -> None:
    queue = load(FAST).open_queue()
    jobs = [prefill(4, [GREEDY] * 4) for _ in range(40)]
    with pytest.raises(RunError, match="steps are queued: wait"):
        for job in jobs:
            queue.enqueue(job)


def test_the_device_itself_waits_for_the_queue(load, expected) -> None:
    device = load(FAST)
    queue = device.open_queue()
    params = [GREEDY, PENALIZED, GREEDY, PENALIZED]
    first, second = job_list(4, params, 1)
    tickets = [queue.enqueue(first), queue.enqueue(second)]
    handle = device.submit(WIDE[3], step_of([(IDS[n : n + 21], 1) for n in range(4)]))
    assert handle.logits.shape == (4, FAST.vocab)
    assert [queue.wait(t).tokens.tolist() for t in tickets] == expected[:2]
    with pytest.raises(RunError, match="has a queue already"):
        device.open_queue()


def test_cancelled_jobs_do_not_run_and_the_queue_goes_on(load, expected) -> None:
    queue = load(FAST).open_queue()
    params = [GREEDY, PENALIZED, GREEDY, PENALIZED]
    first, second = job_list(4, params, 1)
    for _ in range(20):
        queue.enqueue(first)
        queue.enqueue(second)
        queue.cancel()
    tickets = [queue.enqueue(first), queue.enqueue(second)]
    assert [queue.wait(t).tokens.tolist() for t in tickets] == expected[:2]


@pytest.mark.parametrize("queued", range(4))
def test_closing_with_steps_in_flight(programs, queued: int) -> None:
    before = threading.active_count()
    device = CpuDevice()
    device.load(programs(FAST)[1], 2)
    device.allocate(40)
    queue = device.open_queue()
    jobs = job_list(4, [GREEDY] * 4, 3)
    for job in jobs[:queued]:
        queue.enqueue(job)
    device.close()
    device.close()
    with pytest.raises(RunError, match="load"):
        queue.enqueue(jobs[0])
    assert threading.active_count() == before


def test_a_dropped_device_stops_its_thread_before_its_memory_goes(programs) -> None:
    for _ in range(5):
        device = CpuDevice()
        device.load(programs(FAST)[1], 2)
        device.allocate(40)
        queue = device.open_queue()
        for job in job_list(4, [GREEDY] * 4, 3):
            queue.enqueue(job)
        del device, queue, job
        gc.collect()
    tasks = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
    time.sleep(0.05)
    assert tasks < 40


def test_a_forked_child_is_told_and_leaves_the_thread_alone(load) -> None:
    queue = load(FAST, 2).open_queue()
    job = prefill(2, [GREEDY] * 2)
    ticket = queue.enqueue(job)
    child = os.fork()
    if child == 0:
        try:
            queue.enqueue(job)
        except RunError as error:
            queue.close()
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert queue.wait(ticket) is not None


def test_a_process_that_ends_in_mid_flight_ends(programs) -> None:
    code = (
        "import sys\n"
        "from ropeway.runtime.llm import LLM\n"
        "from ropeway.runtime.sampling.params import SamplingParams\n"
        f"llm = LLM({str(programs(FAST)[1].path)!r}, overlap=True, num_threads=2)\n"
        "stream = llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=99))\n"
        "print([next(stream).token_ids for _ in range(3)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("[[")

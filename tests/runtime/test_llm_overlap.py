"""Steps in flight on the real device: the same bits, whatever ends while the next step runs."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.cpu_programs import FAST, compile_decoder

from ropeway.compiler.errors import InputError, RunError
from ropeway.runtime.cores import usable_cores
from ropeway.runtime.engine_options import EngineOptions
from ropeway.runtime.llm import LLM
from ropeway.runtime.outputs import CompletionOutput
from ropeway.runtime.sampling.params import SamplingParams

SHAPE = replace(FAST, dtype="bf16")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("artifact") / "tiny.rope"
    compile_decoder(SHAPE).write(place)
    return place


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def llm(path: Path, threads: int) -> Iterator[LLM]:
    with LLM(path, overlap=True, num_threads=threads) as made:
        yield made


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, SHAPE.vocab, length).tolist()


STEM = prompt(70, 5)
# Each of another kind; many stop where a random token happens to be drawn.
STOPS = list(range(0, SHAPE.vocab, 9))
KINDS = [
    SamplingParams(temperature=0, max_tokens=30, logprobs=2),
    SamplingParams(temperature=0, max_tokens=30, stop_token_ids=STOPS, logprobs=1),
    SamplingParams(temperature=1.0, seed=3, max_tokens=40, stop_token_ids=STOPS, min_tokens=6),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=25, n=3, logprobs=1),
    SamplingParams(temperature=0.8, top_k=9, max_tokens=33, repetition_penalty=1.3, logprobs=0),
    SamplingParams(
        temperature=0.7, seed=8, n=2, max_tokens=20, presence_penalty=0.4, frequency_penalty=0.2,
        stop_token_ids=STOPS,
    ),
    SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2),
    SamplingParams(temperature=0, max_tokens=1),
]  # fmt: skip


def requests() -> tuple[list[list[int]], list[SamplingParams], list[int]]:
    """32 requests; every third begins with the stem, some are more urgent."""
    prompts = [
        STEM[: 32 + n] if n % 3 == 0 else prompt(1 + 7 * n % 60, n) for n in range(4 * len(KINDS))
    ]
    return prompts, KINDS * 4, [(n * 5 % 7) // 6 - (n % 11 == 10) for n in range(len(prompts))]


def serve(path: Path, **options: object) -> tuple[list[list[CompletionOutput]], list[object]]:
    """All requests' outputs, and their prompts' logprobs."""
    prompts, params, priorities = requests()
    with LLM(path, seed=11, **options) as llm:  # type: ignore[arg-type]
        outputs = llm.generate(prompts, params, priority=priorities)
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        llm._engine.core.scheduler.check()
    return [o.outputs for o in outputs], [o.prompt_logprobs for o in outputs]


@pytest.fixture(scope="module")
def expected(path: Path) -> tuple[list[list[CompletionOutput]], list[object]]:
    found = serve(path, overlap=False, num_threads=1)
    ends = [choice.finish_reason for choices in found[0] for choice in choices]
    assert ends.count("stop") > 8 and ends.count("length") > 8
    return found


def block_memory(path: Path, blocks: int) -> int:
    """Bytes of `blocks` KV blocks and the null block."""
    with LLM(path) as llm:
        return (blocks + 1) * llm._engine.device.cache_layout.block_bytes


@pytest.mark.parametrize("seqs", [2, 5, 256])
@pytest.mark.parametrize("blocks", [5, 12, 4000])
def test_mixed_requests_get_the_same_bits(
    path: Path, expected: object, threads: int, seqs: int, blocks: int
) -> None:
    memory = block_memory(path, blocks)
    options = {"num_threads": threads, "max_num_seqs": seqs, "kv_cache_memory": memory}
    assert serve(path, overlap=True, **options) == expected


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("caching", [True, False])
def test_chunks_get_the_same_bits(
    path: Path, expected: object, threads: int, chunk: int, caching: bool
) -> None:
    found = serve(
        path,
        overlap=True,
        num_threads=threads,
        max_prefill_chunk=chunk,
        enable_prefix_caching=caching,
    )
    assert found == expected


def test_neighbours_do_not_notice_aborts_in_mid_flight(
    path: Path, expected: tuple[list[list[CompletionOutput]], list[object]], threads: int
) -> None:
    prompts, params, _ = requests()
    with LLM(path, seed=11, overlap=True, num_threads=threads) as llm:
        streams = [llm.stream(p, one) for p, one in zip(prompts[:8], params[:8], strict=True)]
        doomed = [llm.stream(prompt(9, n), KINDS[n % 6]) for n in range(6)]
        for count, stream in enumerate(doomed):
            for _ in range(count):
                next(stream, None)
            if count % 2:
                stream.close()
            else:
                llm.abort(stream.request_id)
        found = [list(stream) for stream in streams]
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    for deltas, choices in zip(found, expected[0], strict=False):
        for choice in choices:
            mine = [d for d in deltas if d.index == choice.index]
            assert [t for d in mine for t in d.token_ids] == choice.token_ids
            assert mine[-1].finish_reason == choice.finish_reason


class _LateError(Exception):
    """A time limit of the caller's."""


def _time_limit(number: int, frame: object) -> None:
    raise _LateError


def _control_c(number: int, frame: object) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("handler", [_control_c, _time_limit])
def test_interrupts_in_mid_flight_leave_the_engine_whole(
    llm: LLM, handler: Callable[[int, object], None]
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=9)
    prompts = [prompt(n, n) for n in (3, 20, 40, 1)]
    wanted = llm.generate(prompts, greedy)
    interrupted = 0
    previous = signal.signal(signal.SIGALRM, handler)
    try:
        for moment in np.random.default_rng(3).uniform(2e-4, 1e-2, 50):
            signal.setitimer(signal.ITIMER_REAL, moment)
            try:
                for _ in range(30):
                    found = llm.generate(prompts, greedy)
                    assert [o.outputs for o in found] == [o.outputs for o in wanted]
            except (KeyboardInterrupt, _LateError):
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert interrupted > 30
    assert [o.outputs for o in llm.generate(prompts, greedy)] == [o.outputs for o in wanted]
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


def test_closing_between_deltas(path: Path, threads: int) -> None:
    before = threading.active_count()
    for count in range(1, 5):
        llm = LLM(path, overlap=True, num_threads=threads)
        stream = llm.stream(prompt(30), SamplingParams(temperature=0, max_tokens=50))
        for _ in range(count):
            next(stream)
        llm.close()
        with pytest.raises(RunError, match="closed"):
            next(stream)
    assert threading.active_count() == before


def test_a_child_forked_in_mid_flight_is_told_and_the_parent_goes_on(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    [wanted] = llm.generate(prompt(9), params)
    stream = llm.stream(prompt(9), params)
    first = next(stream)
    child = os.fork()
    if child == 0:
        try:
            next(stream)
        except RunError as error:
            llm.close()
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    rest = [t for delta in stream for t in delta.token_ids]
    assert [*first.token_ids, *rest] == wanted.outputs[0].token_ids


def test_threads_share_an_engine_with_steps_in_flight(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    wanted = {n: llm.generate(prompt(5 + n, n), params)[0].outputs for n in range(5)}
    found: dict[int, list[CompletionOutput]] = {}

    def work(seed: int) -> None:
        found[seed] = llm.generate(prompt(5 + seed, seed), params)[0].outputs

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert found == wanted


@pytest.mark.parametrize(
    ("overlap", "num_threads", "wanted"),
    [
        (True, None, True),
        (False, 1, False),
        (None, None, False),
        (None, usable_cores(), False),
        (None, usable_cores() + 1, False),
    ],
)
def test_by_default_steps_overlap_where_a_core_is_free(
    overlap: bool | None, num_threads: int | None, wanted: bool, path: Path
) -> None:
    assert EngineOptions(overlap=overlap, num_threads=num_threads).overlaps is wanted
    with LLM(path, overlap=overlap, num_threads=num_threads) as llm:
        assert (llm._engine.core._depth == 2) is wanted


def test_with_cores_to_spare_steps_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ropeway.runtime.engine_options.usable_cores", lambda: 4)
    assert [EngineOptions(num_threads=n).overlaps for n in (1, 3, 4)] == [True, True, False]


@pytest.mark.parametrize("value", [1, "yes", 0])
def test_overlap_is_a_truth_value(path: Path, value: object) -> None:
    with pytest.raises(InputError, match=r"overlap: .* isn't True, False or None"):
        LLM(path, overlap=value)  # type: ignore[arg-type]

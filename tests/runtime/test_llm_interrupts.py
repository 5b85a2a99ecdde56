"""An LLM outlives interrupts, and tells a forked child what it can't have."""

import os
import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest
from support.toy_device import toy_greedy
from support.toy_llm import toy_llm

from ropeway.compiler.errors import RequestError, RunError
from ropeway.runtime.engine.core import EngineCore
from ropeway.runtime.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("overlap")

VOCAB = 97
GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9] * 4, [1, 2, 3, 4, 9]]


@pytest.mark.parametrize("queued", [0, 1, 2])
def test_an_interrupt_while_queueing_leaves_nothing_behind(
    queued: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, calls = EngineCore.add, [0]

    def interrupted(self: EngineCore, *arguments: object) -> None:
        if calls[0] == queued:
            raise KeyboardInterrupt
        calls[0] += 1
        add(self, *arguments)  # type: ignore[arg-type]

    with toy_llm() as llm:
        free = llm.stats().blocks_free
        with monkeypatch.context() as patch:
            patch.setattr(EngineCore, "add", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[1, 2, 3], [4, 5], [6]], GREEDY)
        [output] = llm.generate([1, 2, 3], GREEDY)
        assert output.outputs[0].token_ids == toy_greedy([1, 2, 3], 6, VOCAB)
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.blocks_free) == (0, 0, free)


def test_a_child_forked_while_the_engine_runs_is_told_at_once() -> None:
    with toy_llm() as llm:
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with llm._lock:
                entered.set()
                leave.wait(20)

        holder = threading.Thread(target=hold)
        holder.start()
        entered.wait(20)
        child = os.fork()
        if child == 0:
            try:
                llm.generate([1, 2], GREEDY)
            except RunError as error:
                llm.close()
                os._exit(7 if "fork" in str(error) else 8)
            os._exit(9)
        leave.set()
        holder.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert llm.generate([1, 2], GREEDY)


@pytest.mark.parametrize("bad", [None, 5, b"x", object(), ["a", "b"]])
def test_stream_takes_what_generate_takes(bad: object) -> None:
    with toy_llm() as llm, pytest.raises(RequestError, match="prompt"):
        llm.stream(bad, GREEDY)  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[1, True], [True, 2], [False]])
def test_truth_values_are_no_token_ids(ids: list[int]) -> None:
    with toy_llm() as llm, pytest.raises(RequestError, match="whole number"):
        llm.generate(ids, GREEDY)


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, 0, "greedy"])
def test_only_sampling_params_are_sampling_params(params: object) -> None:
    with toy_llm() as llm, pytest.raises(RequestError, match="sampling_params"):
        llm.generate([1], params)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [10**400, 10**5000], ids=["e400", "e5000"])
def test_numbers_beyond_any_float_are_refused(value: int) -> None:
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=value)


class _LateError(Exception):
    """A time limit of the caller's."""


def _time_limit(number: int, frame: object) -> None:
    raise _LateError


def _control_c(number: int, frame: object) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("handler", [_control_c, _time_limit])
def test_interrupts_at_any_moment_leave_the_engine_whole(
    handler: Callable[[int, object], None],
) -> None:
    """A timer interrupts the main thread over and over while requests are queued and run."""
    moments = np.random.default_rng(3).uniform(2e-4, 8e-3, 60)
    wanted = [toy_greedy(ids, 6, VOCAB) for ids in PROMPTS]
    with toy_llm(blocks=24) as llm:
        free = llm.stats().blocks_free
        interrupted = 0
        previous = signal.signal(signal.SIGALRM, handler)
        try:
            for moment in moments:
                signal.setitimer(signal.ITIMER_REAL, moment)
                try:
                    for _ in range(20):
                        outputs = llm.generate(PROMPTS, GREEDY)
                        assert [o.outputs[0].token_ids for o in outputs] == wanted
                except (KeyboardInterrupt, _LateError):
                    interrupted += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, previous)
        assert interrupted > 40
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == wanted
        stats = llm.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.blocks_free == free

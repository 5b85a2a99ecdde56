"""A run's figures, from outcomes with known times."""

import math
import random
import statistics

import pytest

from ropeway.compiler.errors import InputError
from ropeway.serving.load.answer import Outcome
from ropeway.serving.load.run import INTERRUPTED, Run
from ropeway.serving.load.summary import parse_objectives, spread, summarize


def outcome(began: float, chunks: list[float], tokens: int, **more: object) -> Outcome:
    """An answer that was due when it began and ended with its last chunk."""
    return Outcome(
        due=began,
        began=began,
        ended=chunks[-1] if chunks else began,
        chunks=chunks,
        output_tokens=tokens,
        prompt_tokens=10,
        counted=True,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("count", [1, 2, 7, 100, 1001])
def test_percentiles_are_those_of_the_standard_library(count: int) -> None:
    draw = random.Random(count)
    times = [draw.expovariate(3.0) for _ in range(count)]
    found = spread(times)
    assert found is not None
    assert found.mean == pytest.approx(1e3 * statistics.fmean(times))
    assert found.max == 1e3 * max(times)
    # Two of a single one, since the library wants two at least.
    cuts = statistics.quantiles(times if count > 1 else times * 2, n=100, method="inclusive")
    assert (found.p50, found.p90, found.p99) == pytest.approx(
        (1e3 * cuts[49], 1e3 * cuts[89], 1e3 * cuts[98])
    )
    assert spread([]) is None


def test_each_figure_has_its_definition() -> None:
    outcomes = [
        outcome(100.0, [100.5, 100.6, 101.1], 5),
        outcome(101.0, [101.25], 1),  # no second token, no TPOT
        outcome(101.5, [], 0, error="HTTP 500", detail="first"),
        outcome(101.6, [101.7], 9, error="HTTP 500", detail="second"),
        outcome(101.7, [101.8], 9, error=INTERRUPTED),
    ]
    outcomes[1].due, outcomes[1].slot_wait = 100.7, 0.2
    outcomes[1].cached_tokens = 4
    run = Run(outcomes, began=100.0, ended=104.0, cpu=0.5, most_open=3)
    found = summarize(run, 2.0, {})
    assert (found.requests, found.completed, found.interrupted) == (5, 2, 1)
    assert found.errors == {"HTTP 500": 2}
    assert found.error_examples == {"HTTP 500": "first"}
    assert found.duration_s == pytest.approx(1.7)  # to the end of the last that ended by itself
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (20, 4, 6)
    assert found.requests_per_s == pytest.approx(2 / 1.7)
    assert found.output_tokens_per_s == pytest.approx(6 / 1.7)
    assert found.total_tokens_per_s == pytest.approx(26 / 1.7)
    assert found.ttft_ms and found.tpot_ms and found.itl_ms and found.e2e_ms
    assert (found.ttft_ms.p50, found.ttft_ms.max) == pytest.approx((375, 500))
    assert (found.tpot_ms.p50, found.tpot_ms.max) == pytest.approx((150, 150))
    assert (found.itl_ms.mean, found.itl_ms.max) == pytest.approx((300, 500))
    assert (found.e2e_ms.p50, found.e2e_ms.max) == pytest.approx((675, 1100))
    assert found.lateness_ms and found.slot_wait_ms
    assert (found.lateness_ms.max, found.slot_wait_ms.max) == pytest.approx((100, 200))
    assert found.tokens_per_chunk == pytest.approx(6 / 4)
    assert found.client_cores == pytest.approx(0.125)
    assert found.goodput is None


def test_goodput_takes_every_objective() -> None:
    outcomes = [
        outcome(0.0, [0.5, 0.6], 2),
        outcome(0.0, [0.5, 0.8], 2),  # TPOT 300 ms
        outcome(0.0, [0.9], 1),  # TTFT 900 ms
        outcome(0.0, [0.5], 1),  # nothing to be slow between
        outcome(0.0, [0.1], 1, error="timeout"),
    ]
    run = Run(outcomes, began=0.0, ended=2.0)
    found = summarize(run, math.inf, {"ttft": 500.0, "tpot": 150.0}).goodput
    assert found and found.share == pytest.approx(2 / 5)
    assert found.requests_per_s == pytest.approx(2 / 0.9)
    ends = summarize(run, math.inf, {"e2e": 700.0}).goodput
    assert ends and ends.share == pytest.approx(2 / 5)


def test_objectives_are_read_or_refused() -> None:
    expected = {"ttft": 500.0, "tpot": 50.0}
    for texts in (["ttft:500,tpot:50"], ["ttft:500 tpot:50"], ["ttft:500", "tpot:5e1"]):
        assert parse_objectives(texts) == expected
    assert parse_objectives([]) == {}
    for text in ("ttft", "ttft:", "ttft:-1", "ttft:nan", "speed:5", "", "ttft:5,"):
        with pytest.raises(InputError, match="--goodput"):
            parse_objectives([text])


def test_nothing_was_sent() -> None:
    found = summarize(Run([], began=1.0, ended=1.5, interrupted=True), 1.0, {"ttft": 1.0})
    assert (found.requests, found.requests_per_s, found.ttft_ms) == (0, 0.0, None)
    assert found.goodput and found.goodput.share == 0.0

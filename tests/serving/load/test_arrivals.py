"""The schedule: its law, its mean, and that it is the same for the same seed."""

import math
import statistics

import numpy as np
import pytest

from ropeway.compiler.errors import InputError
from ropeway.serving.load.arrivals import arrivals, parse_rates

COUNT = 20_000


def test_intervals_of_a_poisson_process_are_exponential() -> None:
    moments = arrivals(COUNT, 4.0, 1.0, seed=3)
    intervals = np.diff(moments)
    assert moments[0] == 0.0
    assert abs(intervals.mean() - 0.25) < 5 * 0.25 / math.sqrt(COUNT)
    # Kolmogorov-Smirnov against 1 - exp(-4 t): beyond 1.95 / sqrt(n) with probability 0.001.
    found = np.arange(1, COUNT) / (COUNT - 1)
    law = 1 - np.exp(-4.0 * np.sort(intervals))
    assert np.abs(found - law).max() < 1.95 / math.sqrt(COUNT)
    # Counts in windows have a variance equal to their mean.
    counts = np.histogram(moments, bins=np.arange(0, moments[-1], 5.0))[0]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_sets_the_spread_and_keeps_the_rate(burstiness: float) -> None:
    intervals = np.diff(arrivals(COUNT, 10.0, burstiness, seed=1))
    # A gamma variable of shape b has the coefficient of variation 1 / sqrt(b).
    assert intervals.mean() == pytest.approx(0.1, rel=0.05)
    assert intervals.std() / intervals.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_constant_and_all_at_once() -> None:
    assert arrivals(4, 2.0, math.inf, seed=0) == [0.0, 0.5, 1.0, 1.5]
    assert arrivals(3, math.inf, 1.0, seed=0) == [0.0, 0.0, 0.0]
    assert arrivals(1, 2.0, 1.0, seed=0) == [0.0]


def test_a_seed_is_a_schedule() -> None:
    assert arrivals(50, 3.0, 1.0, seed=5) == arrivals(50, 3.0, 1.0, seed=5)
    assert arrivals(50, 3.0, 1.0, seed=5) != arrivals(50, 3.0, 1.0, seed=6)
    twice = arrivals(50, 6.0, 1.0, seed=5)
    assert statistics.fmean(np.divide(arrivals(50, 3.0, 1.0, seed=5)[1:], twice[1:])) == 2.0


def test_rates_are_read_or_refused() -> None:
    assert parse_rates("1, 2.5,inf") == [1.0, 2.5, math.inf]
    for text in ("", "0", "-1", "nan", "1,,2", "fast"):
        with pytest.raises(InputError, match="--request-rate"):
            parse_rates(text)

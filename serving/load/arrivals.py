"""When requests arrive: a schedule that is drawn before the run and waits for nothing."""

import math

import numpy as np

from ropeway.compiler.errors import InputError


def parse_rates(text: str) -> list[float]:
    """The sweep that "1,2,4,inf" stands for, in requests a second; raises InputError."""
    rates = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            rate = math.nan
        if not rate > 0:
            raise InputError(
                f"--request-rate {text}: {part.strip() or 'an empty one'} is no rate: give "
                "requests a second, above 0, or inf; several are separated by commas"
            )
        rates.append(rate)
    return rates


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Moments of `count` arrivals, in seconds from the first one, which is at 0.

    Intervals are gamma distributed with mean 1 / `rate` and shape `burstiness`: 1 is a Poisson
    process, less comes in clumps, more is more even, and inf is constant. A rate of inf sends
    everything at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [number / rate for number in range(count)]
    draws = np.random.default_rng([seed, 1]).gamma(burstiness, 1 / (rate * burstiness), count)
    draws[0] = 0.0
    return np.cumsum(draws).tolist()

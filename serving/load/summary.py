"""A run's figures: percentiles, throughput, goodput, errors by kind, and the client's own part.

Definitions, times in milliseconds:

- TTFT: from the moment a request leaves to its first piece of text.
- ITL: between two pieces of text. One may hold several tokens: `tokens_per_chunk` says how many.
- TPOT: from the first piece to the last, over the tokens but the first, of each request.
- E2E: from the moment a request leaves to the end of its answer.
- lateness: how much later than scheduled a request left for reasons of this process; slot wait: how
  long it waited for --max-concurrency.
- goodput: requests a second that met every objective; one that failed met none.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from ropeway.compiler.errors import InputError
from ropeway.serving.load.answer import Outcome
from ropeway.serving.load.run import INTERRUPTED, Run

OBJECTIVES = ("ttft", "tpot", "e2e")


class Spread(msgspec.Struct, frozen=True):
    """Of a set of times, in milliseconds; percentiles are interpolated linearly."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Goodput(msgspec.Struct, frozen=True):
    """Requests that met every objective (milliseconds by name): a second, and of all that ended."""

    objectives: dict[str, float]
    requests_per_s: float
    share: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run's figures; see the module. Rates are per second over `duration_s`, the time from the
    first request to the last answer."""

    request_rate: float | str  # what was asked for; "inf" is a text in JSON
    requests: int
    completed: int
    interrupted: int
    errors: dict[str, int]
    error_examples: dict[str, str]
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    lateness_ms: Spread | None
    slot_wait_ms: Spread | None
    tokens_per_chunk: float | None
    uncounted: int  # answers whose server said nothing of tokens: their chunks were counted
    most_open: int
    client_cores: float  # cores' worth of CPU that this process took
    goodput: Goodput | None = None


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """Objectives such as "ttft:500,tpot:50", in milliseconds; raises InputError."""
    found: dict[str, float] = {}
    for part in (part for text in texts for part in re.split(r"[,\s]+", text.strip())):
        name, _, value = part.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in OBJECTIVES or not 0 < limit < math.inf:
            raise InputError(
                f"--goodput {part}: give NAME:MILLISECONDS with a name of {', '.join(OBJECTIVES)}, "
                "such as ttft:500,tpot:50"
            )
        found[name] = limit
    return found


def summarize(run: Run, rate: float, objectives: dict[str, float]) -> Summary:
    """The figures of `run`, whose requests were sent at `rate` a second."""
    ended = [one for one in run.outcomes if one.error != INTERRUPTED]
    good = [one for one in ended if not one.error]
    failed = [one for one in ended if one.error]
    finish = run.ended if run.interrupted else max((one.ended for one in ended), default=run.ended)
    duration = max(finish - run.began, 1e-9)
    chunks = sum(len(one.chunks) for one in good)
    output = sum(one.output_tokens for one in good)
    prompt = sum(one.prompt_tokens for one in good)
    return Summary(
        request_rate="inf" if math.isinf(rate) else rate,
        requests=len(run.outcomes),
        completed=len(good),
        interrupted=len(run.outcomes) - len(ended),
        errors=dict(Counter(one.error for one in failed).most_common()),
        error_examples={one.error: one.detail for one in reversed(failed)},
        duration_s=duration,
        prompt_tokens=prompt,
        cached_tokens=sum(one.cached_tokens for one in good),
        output_tokens=output,
        requests_per_s=len(good) / duration,
        output_tokens_per_s=output / duration,
        total_tokens_per_s=(output + prompt) / duration,
        ttft_ms=spread([ttft for one in good if (ttft := _ttft(one)) is not None]),
        tpot_ms=spread([tpot for one in good if (tpot := _tpot(one)) is not None]),
        itl_ms=spread([gap for one in good for gap in np.diff(one.chunks).tolist()]),
        e2e_ms=spread([one.ended - one.began for one in good]),
        lateness_ms=spread([_lateness(one) for one in ended]),
        slot_wait_ms=spread([one.slot_wait for one in ended]),
        tokens_per_chunk=output / chunks if chunks else None,
        uncounted=sum(not one.counted for one in good),
        most_open=run.most_open,
        client_cores=run.cpu / max(run.ended - run.began, 1e-9),
        goodput=_goodput(ended, objectives, duration) if objectives else None,
    )


def spread(seconds: Sequence[float]) -> Spread | None:
    """Mean, percentiles and maximum in milliseconds; None of nothing."""
    if not seconds:
        return None
    times = 1e3 * np.asarray(seconds, dtype=np.float64)
    return Spread(float(times.mean()), *np.percentile(times, (50, 90, 99, 100)).tolist())


def _ttft(one: Outcome) -> float | None:
    return one.chunks[0] - one.began if one.chunks else None


def _tpot(one: Outcome) -> float | None:
    if not one.chunks or one.output_tokens < 2:
        return None
    return (one.chunks[-1] - one.chunks[0]) / (one.output_tokens - 1)


def _lateness(one: Outcome) -> float:
    return max(one.began - one.due - one.slot_wait, 0.0)


def _goodput(ended: Sequence[Outcome], objectives: dict[str, float], duration: float) -> Goodput:
    met = sum(_meets(one, objectives) for one in ended if not one.error)
    return Goodput(objectives, met / duration, met / len(ended) if ended else 0.0)


def _meets(one: Outcome, objectives: dict[str, float]) -> bool:
    """A time that an answer doesn't have, such as TPOT with one token, isn't missed."""
    times = {"ttft": _ttft(one), "tpot": _tpot(one), "e2e": one.ended - one.began}
    measured = [(times[name], limit) for name, limit in objectives.items()]
    return all(time is None or 1e3 * time <= limit for time, limit in measured)

"""Prometheus metrics: names, labels and buckets as vLLM users know them, where the meaning is the
same, so that their dashboards work.

Contract: a request is counted once, when it has ended. Counting costs a few microseconds a request
and imports nothing; only who asks for /metrics pays for the exposition.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import HistogramMetricFamily

    from ropeway.serving.process.generation import GenerationRecord


# fmt: off
_LATENCIES = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
_NEXT_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)
# fmt: on


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name = name
        self._about = about
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self._counts)

    @property
    def total(self) -> float:
        """Their sum."""
        return self._sum

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, labels: dict[str, str]) -> "HistogramMetricFamily":
        """As prometheus_client wants it: cumulative."""
        from prometheus_client.core import HistogramMetricFamily  # noqa: PLC0415

        buckets, below = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            below += count
            buckets.append((_bound_text(bound), float(below)))
        family = HistogramMetricFamily(self.name, self._about, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


def _bound_text(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(float(bound))


class Metrics:
    """What the HTTP process counts itself."""

    def __init__(self, max_model_len: int) -> None:
        tokens = _one_two_five(max_model_len)
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN
        )
        self.next_token = Histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a choice.", _NEXT_TOKEN
        )
        self.per_token = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "A request's mean time between tokens.",
            _NEXT_TOKEN,
        )
        self.whole = Histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end.", _LATENCIES
        )
        self.prompt = Histogram("vllm:request_prompt_tokens", "Prompt tokens a request.", tokens)
        self.generation = Histogram(
            "vllm:request_generation_tokens", "Output tokens a request.", tokens
        )
        self.finished: Counter[str] = Counter()

    def count(self, record: "GenerationRecord") -> None:
        """Take in a request that has ended."""
        self.prompt.add(record.prompt_tokens)
        self.generation.add(record.output_tokens)
        self.whole.add(record.ended - record.arrival)
        if record.first_token is not None:
            self.first_token.add(record.first_token - record.arrival)
        for times in record.token_times:
            for before, after in pairwise(times):
                self.next_token.add(after - before)
            if len(times) > 1:
                self.per_token.add((times[-1] - times[0]) / (len(times) - 1))
        self.finished.update(record.finish_reasons)

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        """All of them."""
        first = (self.first_token, self.next_token, self.per_token, self.whole)
        return (*first, self.prompt, self.generation)


def _one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50... up to `limit`."""
    steps = (mantissa * 10**exponent for exponent in range(12) for mantissa in (1, 2, 5))
    return [step for step in steps if step <= limit] or [1]

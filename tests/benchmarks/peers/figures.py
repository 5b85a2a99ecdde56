"""The figures: what each one times, which way is better, and its physical bound."""

from collections.abc import Callable
from dataclasses import dataclass

from ropeway.runtime.bench.suite import Bounds
from ropeway.runtime.bench.workload import Workload

Timed = Callable[[list[list[int]], int], float]  # prompts, new tokens of each -> seconds


@dataclass(frozen=True)
class Figure:
    """One row of the table. What has no `measure` comes with a process: its start, its memory."""

    key: str
    label: str
    more_is_better: bool
    turns: int = 1  # samples of every engine in a round; more where a sample is short
    measure: Callable[[Timed, Workload], float] | None = None
    bound: Callable[[Bounds, Workload], float] | None = None


def _decode(timed: Timed, work: Workload) -> float:
    prompt_only = timed([work.single], 1)
    return (work.gen - 1) / (timed([work.single], work.gen) - prompt_only)


def _batch_rate(prompts: list[list[int]], work: Workload, timed: Timed) -> float:
    return len(prompts) * work.gen / timed(prompts, work.gen)


def _batch_bound(prompts: list[list[int]], work: Workload, bounds: Bounds) -> float:
    return len(prompts) * work.gen / bounds.batch(prompts, work.gen)


def _prefill(timed: Timed, work: Workload) -> float:
    return len(work.prefill1024) / timed([work.prefill1024], 1)


def _prefill_bound(bounds: Bounds, work: Workload) -> float:
    tokens = len(work.prefill1024)
    return tokens / bounds.prompt(tokens)


LOAD, FIRST, PEAK = "load_s", "first_token_s", "peak_mib"

FIGURES = (
    Figure(
        "decode_b1_tok_s",
        "decode, one request, tok/s",
        more_is_better=True,
        measure=_decode,
        bound=lambda bounds, _: 1 / bounds.step(1),
    ),
    Figure(
        "batch8_tok_s",
        "8 requests, prompts included, tok/s",
        more_is_better=True,
        measure=lambda timed, work: _batch_rate(work.batch8, work, timed),
        bound=lambda bounds, work: _batch_bound(work.batch8, work, bounds),
    ),
    Figure(
        "batch32_tok_s",
        "32 requests, prompts included, tok/s",
        more_is_better=True,
        measure=lambda timed, work: _batch_rate(work.batch32, work, timed),
        bound=lambda bounds, work: _batch_bound(work.batch32, work, bounds),
    ),
    Figure(
        "prefill1024_tok_s",
        "prefill of 1,024 tokens, tok/s",
        more_is_better=True,
        turns=3,
        measure=_prefill,
        bound=_prefill_bound,
    ),
    Figure(
        "ttft128_ms",
        "first token, prompt of 128, ms",
        more_is_better=False,
        turns=3,
        measure=lambda timed, work: 1e3 * timed([work.single], 1),
    ),
    Figure(LOAD, "process start to ready, s", more_is_better=False),
    Figure(FIRST, "process start to first token, s", more_is_better=False),
    Figure(PEAK, "peak memory, MiB", more_is_better=False),
)

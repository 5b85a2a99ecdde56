"""The suite: decode, time to first token, prefill and batches, each beside its physical bound.

Bounds: a decode step of B requests takes at least max(weight bytes / read rate, B x flops of one
token / GEMM rate); a prompt token at least its flops without the head / GEMM rate. A batch's
bound is its prompts plus its steps. fraction = bound time / measured time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ropeway.runtime.bench.machine import Ceilings
from ropeway.runtime.bench.quiet import Sampler, peak_memory_mib
from ropeway.runtime.bench.workload import Workload

Generate = Callable[[list[list[int]], int], list[list[int]]]
Result = dict[str, object]


@dataclass(frozen=True)
class ModelCost:
    """What one token costs: bytes of weights a step reads, flops with and without the head."""

    weight_bytes: int
    decode_flops: int
    prompt_flops: int


@dataclass(frozen=True)
class Bounds:
    """Least possible times in seconds on a machine of the given ceilings."""

    cost: ModelCost
    ceilings: Ceilings

    def step(self, batch: int) -> float:
        """One decode step of `batch` requests."""
        read = self.cost.weight_bytes / (self.ceilings.read_gb_s * 1e9)
        return max(read, batch * self.cost.decode_flops / self._flops)

    def prompt(self, tokens: int) -> float:
        """The prefill of `tokens` prompt tokens."""
        return tokens * self.cost.prompt_flops / self._flops

    def batch(self, prompts: list[list[int]], gen: int) -> float:
        """All prompts, which yield the first token each, then the steps that yield the rest."""
        return self.prompt(sum(map(len, prompts))) + (gen - 1) * self.step(len(prompts))

    @property
    def _flops(self) -> float:
        return self.ceilings.gemm_bf16_gflop_s * 1e9


def run_suite(
    generate: Generate,
    workload: Workload,
    sampler: Sampler,
    ceilings: Ceilings,
    note: Callable[[str], None],
) -> Result:
    """Runs every figure; timings are [median, min, max]. `note` is told what runs now.

    The machine's ceilings are sampled between the figures.
    """
    gen = workload.gen
    result: Result = {}

    def timed(prompts: list[list[int]], new: int) -> float:
        start = time.perf_counter()
        generate(prompts, new)
        return time.perf_counter() - start

    note("first call")
    result["first_call_s"] = round(timed([workload.single], 8), 3)
    timed([workload.prefill1024], 2)
    timed([workload.single], gen)

    def decode_rate() -> float:
        prompt_only = timed([workload.single], 1)
        return (gen - 1) / (timed([workload.single], gen) - prompt_only)

    ceilings.sample()
    note("decode, one request")
    result["decode_b1_tok_s"] = sampler.median(decode_rate)
    result["e2e_b1_tok_s"] = sampler.median(lambda: gen / timed([workload.single], gen))
    ceilings.sample()
    note("time to first token")
    result["ttft128_ms"] = sampler.median(lambda: 1e3 * timed([workload.single], 1))
    ttft = sampler.median(lambda: 1e3 * timed([workload.prefill1024], 1))
    result["ttft1024_ms"] = ttft
    result["prefill1024_tok_s"] = [
        round(1e3 * len(workload.prefill1024) / ms, 1) for ms in (ttft[0], ttft[2], ttft[1])
    ]
    for name, prompts in (("batch8", workload.batch8), ("batch32", workload.batch32)):
        ceilings.sample()
        note(f"{name}, prompts included")
        generate(prompts, 4)
        tokens = len(prompts) * gen
        result[f"{name}_tok_s"] = sampler.median(
            lambda prompts=prompts, tokens=tokens: tokens / timed(prompts, gen)  # type: ignore[misc]
        )
    ceilings.sample()
    note("greedy answers")
    result["agree"] = [generate([prompt], 24)[0] for prompt in workload.agree]
    result["others_share_max"] = round(sampler.others_share_max, 3)
    result["peak_mib"] = round(peak_memory_mib())
    return result


def fractions(result: Result, workload: Workload, bounds: Bounds) -> dict[str, float | None]:
    """bound time / measured time of each figure; None where a ceiling was not measured."""
    if not bounds.ceilings.gemm_bf16_gflop_s:
        return dict.fromkeys(("decode_b1", "batch8", "batch32", "prefill1024"))

    def median(key: str) -> float:
        figure = result[key]
        return float(figure[0]) if isinstance(figure, list) else 0.0

    measured = {
        "decode_b1": (bounds.step(1), 1 / median("decode_b1_tok_s")),
        "prefill1024": (
            bounds.prompt(len(workload.prefill1024)),
            median("ttft1024_ms") / 1e3,
        ),
    }
    for name, prompts in (("batch8", workload.batch8), ("batch32", workload.batch32)):
        seconds = len(prompts) * workload.gen / median(f"{name}_tok_s")
        measured[name] = (bounds.batch(prompts, workload.gen), seconds)
    return {name: round(bound / seconds, 3) for name, (bound, seconds) in measured.items()}

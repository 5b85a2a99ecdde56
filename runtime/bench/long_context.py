"""Decode at long contexts: tokens a second, and what part of the bound that is.

The bound of a step counts its GEMMs' weights and the keys and values that it reads, at the read
rate measured in the same run, or its arithmetic at the GEMM rate where that takes longer.

A prefill of 32,768 tokens takes a minute or more and would say nothing about decode, so prompts
aren't computed: the engine schedules them, and the device leaves their steps out. Their KV blocks
hold random finite numbers instead, every byte of them, since blocks that were never written share
one page of zeros and would be read from a cache. Attention takes as long over any numbers.
"""

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import InputError
from ropeway.compiler.targets.cpu.plan import TEMPLATE_FILE, decode_template
from ropeway.runtime.bench.cost import model_cost
from ropeway.runtime.bench.machine import Ceilings
from ropeway.runtime.bench.plan_cost import StepSizes, Work, plan_work
from ropeway.runtime.bench.roofline import Rates
from ropeway.runtime.bench.watched import WatchedDevice, core_over, greedy_request
from ropeway.runtime.devices.base import Device, Handle, StepInputs
from ropeway.runtime.devices.cpu.device import CpuDevice
from ropeway.runtime.engine.core import EngineCore
from ropeway.runtime.engine.limits import step_limits
from ropeway.runtime.engine_options import EngineOptions
from ropeway.runtime.loader import Engine, load_engine
from ropeway.runtime.sampling.batch import empty_result

if TYPE_CHECKING:
    from ropeway.runtime.sampling.batch import SampleBatch, SampleResult

CASES = ((1, 8192), (4, 8192), (1, 32768))
"""(requests, tokens that each has when decoding starts)."""
STEPS = 24
_WARM_UP = 3
LONGEST = 32768 + 64
"""Tokens that the program must hold for these: the longest context and what is decoded there."""

_POOL_VALUES = 1 << 20  # random numbers, of which every block takes another stretch


class LongContext(msgspec.Struct, frozen=True):
    """Decode of `requests` at `context` tokens each; `of_bound` is None without a GEMM rate."""

    requests: int
    context: int
    tok_s: float
    step_ms: float
    step_ms_max: float
    weight_mb: float
    kv_mb: float
    bound_ms: float | None
    of_bound: float | None


@dataclass(frozen=True)
class _Step:
    """A decode step: its sizes, and seconds from its plan to its tokens."""

    sizes: StepSizes
    seconds: float


class _PromptsSkipped(WatchedDevice):
    """Leaves out every step that has prompt tokens, and answers what it is asked of one with 0."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._skipped: Handle | None = None
        self.decoded: StepSizes | None = None  # of the last step, where it was none but decodes

    def submit(self, bucket: Bucket, inputs: StepInputs) -> Handle:
        """Runs decode steps only."""
        tokens, requests, rows = inputs.counts
        self._skipped, self.decoded = None, None
        if tokens == requests:
            self.decoded = StepSizes.of(inputs)
            return self.inner.submit(bucket, inputs)
        self._skipped = Handle(0, bucket, np.zeros((rows, 0), np.float32))
        return self._skipped

    def sample(self, handle: Handle, batch: "SampleBatch") -> "SampleResult":
        """Token 0 for a skipped step."""
        if handle is not self._skipped:
            return self.inner.sample(handle, batch)
        result, _ = empty_result(batch)
        result.tokens.fill(0)
        return result

    def wait(self, handle: Handle) -> None:
        """A skipped step is over."""
        if handle is not self._skipped:
            self.inner.wait(handle)


def measure_long_context(
    artifact: Path,
    threads: int | None,
    ceilings: Ceilings,
    cases: Sequence[tuple[int, int]],
    note: Callable[[str], None],
) -> list[LongContext]:
    """Each case on the artifact; `ceilings` are sampled before each.

    Raises InputError when the artifact isn't for cpu or too short, or the caches don't fit.
    """
    options = EngineOptions(num_threads=threads, enable_prefix_caching=False)
    engine = load_engine(artifact, options)
    try:
        runs = []
        for requests, context in cases:
            note(f"decode of {requests} at {context} tokens")
            ceilings.sample()
            runs.append(_decode(engine, requests, context))
        rates = Rates.of(ceilings)
        return [
            _figures(engine, case, steps, rates) for case, steps in zip(cases, runs, strict=True)
        ]
    finally:
        engine.close()


def _decode(engine: Engine, requests: int, context: int) -> list[_Step]:
    """Steps of a run over blocks that hold random numbers."""
    device = _PromptsSkipped(engine.device)
    limits = step_limits(engine.device.buckets)
    # While the others' prompts are scheduled, the first requests are given tokens already.
    ahead = -(-(requests - 1) * context // limits.max_tokens)
    new = STEPS + _WARM_UP + 2 + ahead
    core = core_over(engine, device, limits, requests=requests, tokens=context + new)
    _fill_cache(engine.device)
    prompt = [1] * context
    for number in range(requests):
        core.add(greedy_request(str(number), prompt, new))
    steps: list[_Step] = []
    while len(steps) < STEPS + _WARM_UP and core.has_work:
        step = _time_step(core, device)
        if step is not None and step.sizes.tokens == requests:
            steps.append(step)
    return steps[_WARM_UP:]


def _time_step(core: EngineCore, device: _PromptsSkipped) -> _Step | None:
    began = time.perf_counter()
    core.step()
    seconds = time.perf_counter() - began
    return None if device.decoded is None else _Step(device.decoded, seconds)


def _fill_cache(device: Device, seed: int = 0) -> None:
    """Random bf16 numbers of deviation 1 in every block; read as f32 they are just as finite."""
    caches = device.loaded.caches if isinstance(device, CpuDevice) else None
    if caches is None:
        raise InputError(f"target {device.name}: the bench measures programs compiled for cpu")
    values = np.random.default_rng(seed).standard_normal(_POOL_VALUES, np.float32)
    halves = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    per_block = caches.block_bytes
    pool = np.tile(halves, 1 + -(-per_block // halves.nbytes))
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * caches.size).from_address(caches.address))
    for block in range(1, caches.blocks):
        start = 2 * ((block * 7919) % _POOL_VALUES)
        memory[block * per_block : (block + 1) * per_block] = pool[start : start + per_block]


def _figures(
    engine: Engine, case: tuple[int, int], steps: Sequence[_Step], rates: Rates
) -> LongContext:
    requests, context = case
    template = decode_template(engine.artifact.read(TEMPLATE_FILE))
    cost = model_cost(engine.artifact)
    middle = steps[len(steps) // 2].sizes
    attention = Work()
    for step, work in zip(template.steps, plan_work(template, middle), strict=True):
        if step.kernel == "attention":
            attention += work
    work = Work(
        flops=requests * cost.decode_flops + attention.flops,
        weight_bytes=cost.weight_bytes,
        kv_bytes=attention.kv_bytes,
    )
    seconds = statistics.median(step.seconds for step in steps)
    bound = rates.bound(work)
    return LongContext(
        requests=requests,
        context=context,
        tok_s=round(requests / seconds, 2),
        step_ms=round(1e3 * seconds, 3),
        step_ms_max=round(1e3 * max(step.seconds for step in steps), 3),
        weight_mb=work.weight_bytes / 1e6,
        kv_mb=work.kv_bytes / 1e6,
        bound_ms=None if bound is None else round(1e3 * bound, 4),
        of_bound=None if bound is None else round(bound / seconds, 3),
    )


def long_context_table(found: Sequence[LongContext]) -> str:
    """The figures as text."""
    head = ("requests", "context", "tok/s", "ms a step", "weights MB", "KV MB", "bound ms", "of it")
    lines = [" ".join(f"{cell:>10}" for cell in head)]
    for one in found:
        cells = (
            str(one.requests),
            str(one.context),
            f"{one.tok_s:.1f}",
            f"{one.step_ms:.3f}",
            f"{one.weight_mb:.1f}",
            f"{one.kv_mb:.1f}",
            "-" if one.bound_ms is None else f"{one.bound_ms:.3f}",
            "-" if one.of_bound is None else f"{one.of_bound:.3f}",
        )
        lines.append(" ".join(f"{cell:>10}" for cell in cells))
    return "decode at long contexts, random weights\n" + "\n".join(lines)

"""Steps of a real run, each timed kernel by kernel.

The engine prefills prompts and decodes them; when a step of the wanted shape comes, it is run once
with time stamps and once without, between which the engine notices nothing. So KV blocks hold what
a model wrote (blocks that were never written all read one page of zeros, which flatters attention),
and host work and sampling lie between the steps, as in service.
"""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ropeway.compiler.artifact.reader import Artifact
from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import InputError, RunError
from ropeway.runtime.bench.plan_cost import StepSizes
from ropeway.runtime.bench.watched import WatchedDevice, core_over, greedy_request
from ropeway.runtime.bench.workload import TokenIds
from ropeway.runtime.devices.base import Device, Handle, StepInputs, StepTiming
from ropeway.runtime.engine.core import EngineCore
from ropeway.runtime.engine.limits import StepLimits, step_limits
from ropeway.runtime.loader import Engine

if TYPE_CHECKING:
    from ropeway.runtime.sampling.batch import SampleBatch, SampleResult

_WARM_UP = 3  # steps of the wanted shape that aren't kept
_SPELLING = re.compile(r"(?:decode:(?P<requests>\d+)@(?P<context>\d+)|prefill:(?P<tokens>\d+))")
_STUCK = 10_000  # engine steps without the wanted one


@dataclass(frozen=True)
class StepShape:
    """A step to look at: `requests` decode at about `tokens` tokens each, or one prompt of `tokens`
    is prefilled whole."""

    kind: Literal["decode", "prefill"]
    requests: int
    tokens: int

    @staticmethod
    def parse(text: str) -> "StepShape":
        """From "decode:32@200" or "prefill:1024". Raises InputError."""
        found = _SPELLING.fullmatch(text)
        sizes = {
            key: int(size) for key, size in (found.groupdict() if found else {}).items() if size
        }
        if not sizes or not all(0 < size < 1 << 31 for size in sizes.values()):
            raise InputError(
                f"--step {text!r} is no step: write decode:REQUESTS@CONTEXT or prefill:TOKENS, "
                f"decode:32@200 for example"
            )
        if "tokens" in sizes:
            return StepShape("prefill", 1, sizes["tokens"])
        return StepShape("decode", sizes["requests"], sizes["context"])

    def __str__(self) -> str:
        if self.kind == "prefill":
            return f"prefill:{self.tokens}"
        return f"decode:{self.requests}@{self.tokens}"


DEFAULT_SHAPES = tuple(
    map(StepShape.parse, ("decode:1@200", "decode:8@200", "decode:32@200", "prefill:1024"))
)


@dataclass(frozen=True)
class CapturedStep:
    """One step of a run: its sizes, what each plan step took, and what lay around them.

    Nanoseconds. `wall`: the call with stamps; `plain`: the same step run again without; `sample`:
    drawing its tokens.
    """

    sizes: StepSizes
    kernels: tuple[int, ...]
    wall: int
    plain: int
    sample: int


@dataclass(frozen=True)
class Capture:
    """Several steps of one shape. `host`: the engine's work in a step, nanoseconds, on average."""

    shape: StepShape
    bucket: Bucket
    steps: tuple[CapturedStep, ...]
    host: float


class _Recorder(WatchedDevice):
    """Times the steps that `wanted` picks."""

    def __init__(self, device: Device, wanted: Callable[[StepInputs], bool]) -> None:
        super().__init__(device)
        self._wanted = wanted
        self._open: tuple[Handle, StepSizes, list[StepTiming], int, int] | None = None
        self.bucket: Bucket | None = None
        self.steps: list[CapturedStep] = []

    def submit(self, bucket: Bucket, inputs: StepInputs) -> Handle:
        """Runs a wanted step twice: the second run writes what the first wrote."""
        if not self._wanted(inputs):
            return self.inner.submit(bucket, inputs)
        began = time.perf_counter_ns()
        timings = self.inner.profile(bucket, inputs, 1)
        stamped = time.perf_counter_ns()
        handle = self.inner.submit(bucket, inputs)
        self.inner.wait(handle)
        plain = time.perf_counter_ns() - stamped
        self.bucket = bucket
        self._open = (handle, StepSizes.of(inputs), timings, stamped - began, plain)
        return handle

    def sample(self, handle: Handle, batch: "SampleBatch") -> "SampleResult":
        """Closes the record of the step that is sampled from."""
        began = time.perf_counter_ns()
        result = self.inner.sample(handle, batch)
        took = time.perf_counter_ns() - began
        if self._open is not None and self._open[0] is handle:
            _, sizes, timings, wall, plain = self._open
            kernels = tuple(timing.nanoseconds for timing in timings)
            self.steps.append(CapturedStep(sizes, kernels, wall, plain, took))
            self._open = None
        return result


def capture(engine: Engine, shape: StepShape, repeats: int) -> Capture:
    """`repeats` steps of `shape` out of a run of the engine's program.

    Takes over the caches of `engine`, whose own core must not run afterwards. Raises InputError for
    a shape that the program can't have.
    """
    check_shape(engine.artifact, shape)
    limits = step_limits(engine.device.buckets)
    recorder = _Recorder(engine.device, lambda inputs: _matches(shape, inputs))
    if shape.kind == "decode":
        host = _decode(engine, recorder, limits, shape, repeats)
    else:
        host = _prefill(engine, recorder, limits, shape, repeats)
    kept = tuple(recorder.steps[_WARM_UP : _WARM_UP + repeats])
    if recorder.bucket is None or len(kept) < repeats:
        raise RunError(f"only {len(kept)} steps of {shape} came, not {repeats}: please report it")
    return Capture(shape, recorder.bucket, kept, host)


def check_shape(artifact: Artifact, shape: StepShape) -> None:
    """Raises InputError when no step of the program can be like `shape`."""
    path, longest = artifact.path, artifact.manifest.model.max_model_len
    limits = step_limits(artifact.manifest.buckets)
    if shape.requests > limits.max_seqs:
        raise InputError(
            f"{path}: a step holds {limits.max_seqs} requests, not the {shape.requests} of "
            f"{shape}: ask for fewer, or compile with larger buckets"
        )
    if shape.kind == "prefill" and shape.tokens > limits.max_chunk:
        raise InputError(
            f"{path}: a step holds {limits.max_chunk} prompt tokens, not the {shape.tokens} of "
            f"{shape}: ask for fewer, or compile with a larger --max-num-batched-tokens"
        )
    if shape.tokens >= longest:
        raise InputError(
            f"{path}: holds sequences of {longest} tokens, too few for {shape}: ask for less, or "
            f"compile with a larger --max-model-len"
        )


def default_shapes(artifact: Artifact) -> list[StepShape]:
    """Those of DEFAULT_SHAPES that the program can have. Raises InputError when it has none."""
    fitting = []
    for shape in DEFAULT_SHAPES:
        with suppress(InputError):
            check_shape(artifact, shape)
            fitting.append(shape)
    if not fitting:
        check_shape(artifact, DEFAULT_SHAPES[0])
    return fitting


def _matches(shape: StepShape, inputs: StepInputs) -> bool:
    tokens, requests, _ = inputs.counts
    if shape.kind == "prefill":
        return requests == 1 and tokens == shape.tokens
    return tokens == requests == shape.requests and bool((inputs.lengths > 1).all())


def _decode(
    engine: Engine, recorder: _Recorder, limits: StepLimits, shape: StepShape, repeats: int
) -> float:
    """Contexts lie around the wanted one: the steps before and after it count as well."""
    model = engine.artifact.manifest.model
    before = _WARM_UP + (repeats + 1) // 2
    prompt = max(1, shape.tokens - before)
    # Requests whose prompts come first are ahead of the others by the steps that those take.
    new = repeats + _WARM_UP + 2 + -(-shape.requests * prompt // limits.max_tokens)
    prompt = max(1, min(prompt, model.max_model_len - new))
    core = core_over(engine, recorder, limits, requests=shape.requests, tokens=prompt + new)
    ids = TokenIds(core.vocab_size)
    for number in range(shape.requests):
        core.add(greedy_request(str(number), ids.take(prompt), new))
    _step_until(core, lambda: len(recorder.steps) >= _WARM_UP)
    before_host = core.stats().host_seconds
    _step_until(core, lambda: len(recorder.steps) >= _WARM_UP + repeats)
    return 1e9 * (core.stats().host_seconds - before_host) / repeats


def _prefill(
    engine: Engine, recorder: _Recorder, limits: StepLimits, shape: StepShape, repeats: int
) -> float:
    core = core_over(engine, recorder, limits, requests=1, tokens=shape.tokens + 1)
    ids = TokenIds(core.vocab_size)
    host = 0.0
    for number in range(_WARM_UP + repeats):
        core.add(greedy_request(str(number), ids.take(shape.tokens), 1))
        before_host = core.stats().host_seconds
        _step_until(core, lambda: not core.has_work)
        if number >= _WARM_UP:
            host += core.stats().host_seconds - before_host
    return 1e9 * host / repeats


def _step_until(core: EngineCore, done: Callable[[], bool]) -> None:
    for _ in range(_STUCK):
        if done():
            return
        core.step()
    raise RunError("the engine never made the wanted step: please report it")

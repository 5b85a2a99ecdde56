"""A device between engine and hardware that a figure looks through, and an engine core over it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import InputError
from ropeway.runtime.devices.base import (
    CacheLayout,
    Device,
    DeviceMemory,
    Handle,
    StepInputs,
    StepQueue,
    StepTiming,
)
from ropeway.runtime.engine.core import EngineCore
from ropeway.runtime.engine.limits import StepLimits
from ropeway.runtime.engine.messages import GenerationRequest
from ropeway.runtime.loader import Engine, kv_blocks
from ropeway.runtime.sampling.params import SamplingParams

if TYPE_CHECKING:
    from ropeway.compiler.artifact import Artifact
    from ropeway.runtime.sampling.batch import SampleBatch, SampleResult


class WatchedDevice:
    """Passes every call on; figures override what they look at."""

    def __init__(self, device: Device) -> None:
        """`device` is loaded already and stays the caller's to close."""
        self.inner = device
        self.name = device.name

    @property
    def buckets(self) -> Sequence[Bucket]:
        """See Device.buckets."""
        return self.inner.buckets

    @property
    def cache_layout(self) -> CacheLayout:
        """See Device.cache_layout."""
        return self.inner.cache_layout

    def load(self, artifact: "Artifact", num_threads: int | None = None) -> None:
        """See Device.load."""
        self.inner.load(artifact, num_threads)

    def allocate(self, num_blocks: int) -> None:
        """See Device.allocate."""
        self.inner.allocate(num_blocks)

    def prepare(self, bucket: Bucket) -> None:
        """See Device.prepare."""
        self.inner.prepare(bucket)

    def submit(self, bucket: Bucket, inputs: StepInputs) -> Handle:
        """See Device.submit."""
        return self.inner.submit(bucket, inputs)

    def sample(self, handle: Handle, batch: "SampleBatch") -> "SampleResult":
        """See Device.sample."""
        return self.inner.sample(handle, batch)

    def wait(self, handle: Handle) -> None:
        """See Device.wait."""
        self.inner.wait(handle)

    def open_queue(self) -> StepQueue | None:
        """None: what is looked at runs call by call."""
        return None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Device.copy_blocks."""
        self.inner.copy_blocks(pairs)

    def memory(self) -> DeviceMemory:
        """See Device.memory."""
        return self.inner.memory()

    def profile(self, bucket: Bucket, inputs: StepInputs, runs: int) -> list[StepTiming]:
        """See Device.profile."""
        return self.inner.profile(bucket, inputs, runs)

    def close(self) -> None:
        """See Device.close."""
        self.inner.close()


def core_over(
    engine: Engine, device: Device, limits: StepLimits, *, requests: int, tokens: int
) -> EngineCore:
    """A core over `device` whose cache holds `requests` sequences of `tokens` tokens, no more.

    So little that blocks are used again soon: fresh ones would add page faults to what is measured.
    It takes the device's caches over from the core that `engine` was loaded with. Raises InputError
    when the program is for shorter sequences or the memory isn't there.
    """
    model = engine.artifact.manifest.model
    if tokens > model.max_model_len:
        raise InputError(
            f"{engine.artifact.path}: holds sequences of {model.max_model_len} tokens, and "
            f"{tokens} are needed: ask for less, or compile with a larger --max-model-len"
        )
    layout = device.cache_layout
    blocks = requests * -(-tokens // layout.block_size) + 1
    wanted = kv_blocks(
        layout,
        max_tokens=0,
        available=device.memory().available,
        wanted=blocks * layout.block_bytes,
    )
    return EngineCore(
        device,
        limits,
        num_blocks=wanted,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        enable_prefix_caching=False,
    )


def greedy_request(name: str, prompt: Sequence[int], new: int) -> GenerationRequest:
    """A request for exactly `new` tokens."""
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    return GenerationRequest(request_id=name, prompt=tuple(prompt), params=params)

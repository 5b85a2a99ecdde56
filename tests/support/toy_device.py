"""A device whose model is a toy that can't forgive a wrong KV block.

Each token writes a 64-bit key of (token, position) through its slot; each wanted row reads the keys
of positions 0..p through its block table and mixes them into its logits. Any block that was lost,
shared too far, overwritten or not yet computed changes the tokens. `toy_logits` answers the same
question from the tokens alone: the oracle.
"""

from collections.abc import Sequence

import numpy as np

from ropeway.compiler.config import Bucket, default_buckets
from ropeway.compiler.errors import RunError
from ropeway.runtime.devices.base import CacheLayout, DeviceMemory, Handle, StepInputs
from ropeway.runtime.sampling.batch import SampleBatch, SampleResult
from ropeway.runtime.sampling.numpy_sampler import NumpySampler

_A = np.uint64(0x9E3779B97F4A7C15)
_B = np.uint64(0xC2B2AE3D27D4EB4F)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return _mix((tokens.astype(np.uint64) + np.uint64(1)) * _A + positions.astype(np.uint64) * _B)


def _logits(keys: np.ndarray, vocab: int) -> np.ndarray:
    total = _mix(np.array([keys.sum(dtype=np.uint64)]))
    values = _mix(total + np.arange(vocab, dtype=np.uint64) * _B)
    return (values >> np.uint64(40)).astype(np.float32) / np.float32(2**22)


def toy_logits(tokens: Sequence[int], vocab: int) -> np.ndarray:
    """float32 [vocab] logits after `tokens`, without any cache."""
    ids = np.asarray(tokens)
    return _logits(_keys(ids, np.arange(len(ids))), vocab)


def toy_greedy(
    prompt: Sequence[int], count: int, vocab: int, stop: Sequence[int] = ()
) -> list[int]:
    """The greedy continuation by brute force, ended after `count` tokens or a stop id."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(toy_logits(tokens, vocab).argmax()))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class ToyDevice:
    """Implements the Device protocol over a numpy array of keys."""

    name = "toy"

    def __init__(
        self, *, vocab: int = 97, block_size: int = 4, buckets: Sequence[Bucket] | None = None
    ) -> None:
        self.vocab = vocab
        self.buckets = tuple(buckets or default_buckets(8, 64))
        self.cache_layout = CacheLayout(block_size, block_size * 8, 1)
        self.steps: list[tuple[Bucket, StepInputs]] = []
        self.copied: list[tuple[int, int]] = []
        self.fail_next = False
        self.closed = False
        self._cache = np.zeros(0, np.uint64)
        self._sampler = NumpySampler(vocab)

    def load(self, artifact: object, num_threads: int | None = None) -> None:
        """Nothing to load."""

    def allocate(self, num_blocks: int) -> None:
        """Blocks start with garbage: whoever reads an unwritten key gets wrong tokens."""
        rng = np.random.default_rng(7)
        size = num_blocks * self.cache_layout.block_size
        self._cache = rng.integers(0, 2**63, size, dtype=np.uint64)

    def prepare(self, bucket: Bucket) -> None:
        """Nothing to prepare."""

    def submit(self, bucket: Bucket, inputs: StepInputs) -> Handle:
        """Checks the inputs as a strict device would, writes the keys, then reads them."""
        tokens, requests, rows = inputs.counts
        assert (tokens, requests, rows) <= (bucket.tokens, bucket.requests, bucket.rows)
        assert requests <= bucket.requests and rows <= bucket.rows
        for array in (inputs.ids, inputs.positions, *inputs.slots, *inputs.block_tables):
            assert array.dtype == np.int32 and array.flags.c_contiguous
        for array in (inputs.query_start, inputs.lengths, inputs.rows):
            assert array.dtype == np.int32 and array.flags.c_contiguous
        if self.fail_next:
            self.fail_next = False
            raise RunError("toy: planted failure")
        slots = inputs.slots[0]
        kept = slots != -1
        written = slots[kept]
        assert len(set(written.tolist())) == len(written)
        assert (written >= self.cache_layout.block_size).all()
        self._cache[written] = _keys(inputs.ids, inputs.positions)[kept]
        owner = np.searchsorted(inputs.query_start, inputs.rows, side="right") - 1
        out = np.empty((rows, self.vocab), np.float32)
        for i, (row, request) in enumerate(zip(inputs.rows, owner, strict=True)):
            out[i] = _logits(
                self._read(inputs, int(request), int(inputs.positions[row])), self.vocab
            )
        self.steps.append((bucket, inputs))
        return Handle(len(self.steps), bucket, out)

    def _read(self, inputs: StepInputs, request: int, position: int) -> np.ndarray:
        assert position < inputs.lengths[request]
        size = self.cache_layout.block_size
        at = np.arange(position + 1)
        blocks = inputs.block_tables[0][request][at // size]
        assert blocks.min() > 0, "the null block was read"
        return self._cache[blocks * size + at % size]

    def sample(self, handle: Handle, batch: SampleBatch) -> SampleResult:
        """Samples with the numpy sampler, the reference of the native one."""
        assert handle.number == len(self.steps)
        return self._sampler.sample(handle.logits, batch)

    def wait(self, handle: Handle) -> None:
        """Every step is done when submit returns."""

    def open_queue(self) -> None:
        """None of its own."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies keys, in order."""
        size = self.cache_layout.block_size
        for source, destination in pairs:
            self._cache[destination * size : (destination + 1) * size] = self._cache[
                source * size : (source + 1) * size
            ]
            self.copied.append((source, destination))

    def memory(self) -> DeviceMemory:
        """Only the cache."""
        return DeviceMemory(0, 0, self._cache.nbytes, 1 << 30)

    def profile(self, bucket: Bucket, inputs: StepInputs, runs: int) -> list[object]:
        """Can't."""
        return []

    def close(self) -> None:
        """Remembers that it was closed."""
        self.closed = True

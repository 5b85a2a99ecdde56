"""What the engine asks of a device: load a program, hold its KV blocks, replay a step, sample.

Contract: the engine hands over true sizes only; padding up to the bucket is the device's own
affair. Every array is C-contiguous int32 on the host. A device serves one program and is driven
by one thread at a time; several devices live side by side in one process.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ropeway.compiler.config import Bucket

if TYPE_CHECKING:
    from ropeway.compiler.artifact import Artifact
    from ropeway.runtime.sampling.batch import SampleBatch, SampleResult

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
UInt8Array = NDArray[np.uint8]


class StepInputs(msgspec.Struct, frozen=True):
    """The host inputs of one step: T tokens of R requests, L of whose rows are wanted.

    Request r owns tokens query_start[r]..query_start[r + 1]; `lengths[r]` counts its tokens in the
    cache once this step has run, so its token j sits at position
    lengths[r] - (query_start[r + 1] - query_start[r]) + j.
    """

    ids: Int32Array  # [T], token ids
    positions: Int32Array  # [T]
    slots: Sequence[Int32Array]  # per cache group [T]: block * block_size + offset in the block
    block_tables: Sequence[Int32Array]  # per cache group [R, MB]; 0 is the null block
    query_start: Int32Array  # [R + 1]
    lengths: Int32Array  # [R]
    rows: Int32Array  # [L], the token rows whose logits are wanted
    peak_only: UInt8Array | None = None  # [L], 1 where the largest logit is all that is read

    @property
    def counts(self) -> tuple[int, int, int]:
        """(tokens, requests, rows)."""
        return len(self.ids), len(self.lengths), len(self.rows)


class CacheLayout(msgspec.Struct, frozen=True):
    """How a device keeps KV: what the block pool needs to know."""

    block_size: int  # tokens in a block
    block_bytes: int  # bytes of one block, over all layers
    groups: int  # cache groups: each has its own slots and block tables

    @property
    def token_bytes(self) -> int:
        """KV bytes per token, over all layers."""
        return self.block_bytes // self.block_size


class DeviceMemory(msgspec.Struct, frozen=True):
    """Bytes that a device holds, and those that it could still get."""

    weights: int
    arena: int
    cache: int
    available: int


class StepTiming(msgspec.Struct, frozen=True):
    """Time one plan step took, summed over the profiled runs."""

    op: str  # IR op and source line
    kernel: str
    nanoseconds: int


class Handle(msgspec.Struct, frozen=True):
    """A submitted step; `logits` is float32 [L, V], valid until the next submit.

    A device may leave out the rows that `StepInputs.peak_only` marks.
    """

    number: int
    bucket: Bucket
    logits: Float32Array


class StepJob(msgspec.Struct, frozen=True):
    """A step as a queue runs it: copy blocks, take the fed ids, replay, sample.

    `feed` [T] names for each token the row of the job before whose draw is its id; -1: the id is
    in `inputs`; None: all are. Nothing may change these arrays until the job was waited for.
    """

    bucket: Bucket
    inputs: StepInputs
    batch: "SampleBatch | None" = None
    copies: Sequence[tuple[int, int]] = ()
    feed: Int32Array | None = None


class StepQueue(Protocol):
    """Steps that run one after another, in the order in which they were queued.

    A token fed by a draw that failed is kept nowhere: its row touches nothing of others. One
    thread at a time queues and waits; what else is asked of the device waits for what is queued.
    """

    def enqueue(self, job: StepJob) -> int:
        """Queue a job; its ticket. RunError when it can't fit the program, or too many wait."""
        ...

    def wait(self, ticket: int) -> "SampleResult | None":
        """Return once the job has run; None without a batch. Each ticket once, in their order.

        RunError when its inputs pointed outside the bucket or the caches, or a job before it
        failed, which stops those queued behind it.
        """
        ...

    def cancel(self) -> None:
        """Forget every job; return once none runs."""
        ...

    def close(self) -> None:
        """Cancel, and release what the queue holds; a second call does nothing."""
        ...


class Device(Protocol):
    """The run-time half of a target."""

    @property
    def name(self) -> str:
        """The target's name."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Every bucket of the loaded program."""
        ...

    @property
    def cache_layout(self) -> CacheLayout:
        """How the loaded program keeps KV."""
        ...

    def load(self, artifact: "Artifact", num_threads: int | None = None) -> None:
        """Take the program of an open artifact. None threads: one per core that we may use.

        Raises ArtifactError for a program that doesn't check out, TargetError when this machine
        can't run it, RunError when the load-time self-check fails.
        """
        ...

    def allocate(self, num_blocks: int) -> None:
        """Give every layer `num_blocks` zeroed KV blocks, the null block 0 included."""
        ...

    def prepare(self, bucket: Bucket) -> None:
        """Do once whatever makes the first submit of `bucket` as fast as the next."""
        ...

    def submit(self, bucket: Bucket, inputs: StepInputs) -> Handle:
        """Run one step; RunError when the inputs point outside the bucket or the caches."""
        ...

    def sample(self, handle: Handle, batch: "SampleBatch") -> "SampleResult":
        """Sample from the handle's logits, which it may overwrite."""
        ...

    def wait(self, handle: Handle) -> None:
        """Return once the step's effects are visible; at once on a synchronous device."""
        ...

    def open_queue(self) -> StepQueue | None:
        """A queue that runs steps while the host does something else; None where there is none.

        One a device at most. The device closes it.
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks (source, destination) in every layer, in the order given."""
        ...

    def memory(self) -> DeviceMemory:
        """What the device holds now."""
        ...

    def profile(self, bucket: Bucket, inputs: StepInputs, runs: int) -> list[StepTiming]:
        """Run a step `runs` times and time each plan step; empty where a device can't."""
        ...

    def close(self) -> None:
        """Release threads and memory; a second call does nothing."""
        ...

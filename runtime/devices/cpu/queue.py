"""Steps in flight on the CPU: a native thread runs them while the host does something else."""

import ctypes
import os
import weakref
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import RunError
from ropeway.runtime.cores import usable_cores
from ropeway.runtime.devices.base import StepJob
from ropeway.runtime.devices.cpu import records
from ropeway.runtime.devices.cpu.library import load_library
from ropeway.runtime.devices.cpu.native import Team
from ropeway.runtime.devices.cpu.program import Program, step_data, step_fault
from ropeway.runtime.sampling.native import NativeSampler, PreparedSample

if TYPE_CHECKING:
    from ropeway.runtime.sampling.batch import SampleBatch, SampleResult


_COMING = -1  # no ticket


class _Posted(msgspec.Struct, frozen=True):
    """A job in native form, and everything that it points to."""

    bucket: Bucket
    record: records.JobRecord
    sample: PreparedSample | None
    kept: list[Any]


class NativeQueue:
    """See `ropeway.runtime.devices.base.StepQueue`; at most four jobs wait."""

    def __init__(self, program: Program, team: Team, sampler: NativeSampler) -> None:
        """Start the thread. Raises RunError when the system gives none."""
        self._program, self._team, self._sampler = program, team, sampler
        self._library = load_library()
        self._posted: dict[int, _Posted] = {}
        spare = team.size < usable_cores()
        handle = self._library.rw_queue_create(program.handle, team.handle, spare)
        if not handle:
            raise RunError(
                "can't start a thread for the steps: close other programs, or overlap off"
            )
        self._handle: int = handle
        # The thread reads what was posted, and all three, until it has been stopped.
        held = (self._posted, program, team, sampler)
        self._free = weakref.finalize(self, _destroy, self._library, handle, os.getpid(), held)

    def enqueue(self, job: StepJob) -> int:
        """See StepQueue.enqueue."""
        self._check()
        posted = self._pack(job)
        # First: an interrupt after the call mustn't free what the thread reads.
        self._posted[_COMING] = posted
        ticket: int = self._library.rw_queue_post(self._handle, ctypes.byref(posted.record))
        if ticket < 0:
            del self._posted[_COMING]
            raise RunError(f"{len(self._posted)} steps are queued: wait for the first")
        self._posted[ticket] = posted
        del self._posted[_COMING]
        return ticket

    def wait(self, ticket: int) -> "SampleResult | None":
        """See StepQueue.wait."""
        self._check()
        self._library.rw_queue_wait(self._handle, ticket)
        posted = self._posted.pop(ticket)
        if posted.record.report.fault:
            raise step_fault(posted.bucket, posted.record.report)
        return None if posted.sample is None else posted.sample.finish()

    def drain(self) -> None:
        """Return once no job runs or waits; their results stay to be waited for."""
        if self._free.alive and self._posted:
            self._check()
            self._library.rw_queue_drain(self._handle)

    def cancel(self) -> None:
        """See StepQueue.cancel."""
        if self._free.alive and self._posted:
            self._check()
            self._library.rw_queue_cancel(self._handle)
            self._posted.clear()

    def close(self) -> None:
        """See StepQueue.close."""
        self._free()
        self._posted.clear()

    def _check(self) -> None:
        self._team.check_process()
        if not self._free.alive:
            raise RunError("the device holds no program: load() one first")

    def _pack(self, job: StepJob) -> _Posted:
        program, inputs = self._program, job.inputs
        if job.feed is not None:
            if job.feed.shape != inputs.ids.shape:
                raise RunError(f"{len(inputs.ids)} ids with a feed of {job.feed.shape}")
            # Written by the thread.
            slots = [np.array(group, np.int32) for group in inputs.slots]
            ids = np.array(inputs.ids, np.int32)
            inputs = msgspec.structs.replace(inputs, ids=ids, slots=slots)
        data, kept = step_data(inputs)
        copies = program.pack_copies(job.copies)
        record = records.JobRecord(
            bucket=program.number(job.bucket),
            follows=bool(self._posted),
            data=data,
            ids=data.ids,
            slots=data.slots,
            copies=copies,
            copy_count=len(job.copies),
        )
        kept += [copies, data, inputs]
        if job.feed is not None:
            kept.append(feed := np.ascontiguousarray(job.feed, np.int32))
            record.feed = feed.ctypes.data
        sample = None
        if job.batch is not None:
            sample = self._prepare(job.bucket, len(inputs.rows), job.batch)
            record.sample = sample.args
            fills = (records.SlotFill * len(job.batch.resets))()
            for fill, reset in zip(fills, job.batch.resets, strict=True):
                prompt, output = self._sampler.slot_ids(reset)
                fill.slot = reset.slot
                fill.prompt, fill.prompt_count = prompt.ctypes.data, prompt.size
                fill.output, fill.output_count = output.ctypes.data, output.size
                kept += [prompt, output]
            record.fills, record.fill_count = fills, len(fills)
            kept.append(fills)
        return _Posted(job.bucket, record, sample, kept)

    def _prepare(self, bucket: Bucket, rows: int, batch: "SampleBatch") -> PreparedSample:
        """Where the logits will lie is known before they do."""
        if bucket not in self._program.plans:
            raise RunError(f"no bucket {bucket.name} in this program")
        if rows > bucket.rows:
            raise RunError(f"{rows} rows in bucket {bucket.name}, which takes {bucket.rows}")
        return self._sampler.prepare(self._program.logits(bucket, rows), batch)


def _destroy(library: ctypes.CDLL, handle: int, process: int, held: object) -> None:
    """Stop the thread, unless this is a forked child, which has none."""
    if os.getpid() == process:
        library.rw_queue_destroy(handle)
    del held

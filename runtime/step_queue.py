"""A queue of steps over any device: each job runs whole when it is queued.

For devices that can't run steps behind the host's back, and for figures that look at a device's
every call.
"""

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ropeway.runtime.devices.base import Device, Int32Array, StepInputs, StepJob

if TYPE_CHECKING:
    from ropeway.runtime.sampling.batch import SampleResult


class InlineQueue:
    """See `ropeway.runtime.devices.base.StepQueue`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: SampleResult | None = None
        self._results: dict[int, SampleResult | None] = {}
        self._count = 0

    def enqueue(self, job: StepJob) -> int:
        """Runs the job; what it raises comes from here."""
        self._count += 1
        self._results[self._count] = self.run(job)
        return self._count

    def run(self, job: StepJob) -> "SampleResult | None":
        """Everything that a job asks for, call by call."""
        device, inputs = self._device, job.inputs
        if job.feed is not None:
            drawn = np.zeros(0, np.int32) if self._last is None else self._last.tokens
            inputs = fed_inputs(inputs, job.feed, drawn)
        if job.copies:
            device.copy_blocks(job.copies)
        handle = device.submit(job.bucket, inputs)
        self._last = None if job.batch is None else device.sample(handle, job.batch)
        device.wait(handle)
        return self._last

    def wait(self, ticket: int) -> "SampleResult | None":
        """See StepQueue.wait."""
        return self._results.pop(ticket)

    def cancel(self) -> None:
        """See StepQueue.cancel: nothing ever waits to run."""
        self._results.clear()

    def close(self) -> None:
        """Nothing to release."""


def fed_inputs(inputs: StepInputs, feed: Int32Array, drawn: Int32Array) -> StepInputs:
    """`inputs` with the ids that the job before drew; a token fed by a draw that failed is computed
    as id 0 and kept nowhere. The oracle of what a device's own queue does."""
    ids, slots = inputs.ids.copy(), [group.copy() for group in inputs.slots]
    for at in np.flatnonzero(feed >= 0).tolist():
        token = int(drawn[feed[at]])
        ids[at] = max(token, 0)
        if token < 0:
            for group in slots:
                group[at] = -1
    return msgspec.structs.replace(inputs, ids=ids, slots=slots)

"""A queue that runs a job only when it is waited for: whatever the host changed meanwhile shows."""

from collections import deque

from ropeway.compiler.errors import RunError
from ropeway.runtime.devices.base import Device, StepJob
from ropeway.runtime.sampling.batch import SampleResult
from ropeway.runtime.step_queue import InlineQueue


class LazyQueue(InlineQueue):
    """Implements the StepQueue protocol, a failure stopping the jobs behind it."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.waiting: deque[tuple[int, StepJob]] = deque()
        self.most = 0  # jobs that ever waited at once
        self._next = 0
        self._failed = False

    def enqueue(self, job: StepJob) -> int:
        """Only notes the job."""
        if not self.waiting:
            self._failed = False
        self._next += 1
        self.waiting.append((self._next, job))
        self.most = max(self.most, len(self.waiting))
        return self._next

    def wait(self, ticket: int) -> SampleResult | None:
        """Runs the job."""
        number, job = self.waiting.popleft()
        assert number == ticket
        if self._failed:
            raise RunError("a step before it failed")
        try:
            return self.run(job)
        except BaseException:
            self._failed = True
            raise

    def cancel(self) -> None:
        """Forgets them."""
        self.waiting.clear()

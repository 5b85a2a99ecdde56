"""How many requests may wait, and what one that comes too many is told."""

import math
from collections import deque

from ropeway.serving.errors import ApiError

_REMEMBERED = 64  # finishes
_WINDOW = 60.0  # seconds that they count
_LONGEST = 60  # seconds that Retry-After says at most


class Queue:
    """Counts open choices against a limit."""

    def __init__(self, waiting: int) -> None:
        """`waiting` choices may be queued beyond those that run."""
        self._waiting = waiting
        self._finishes: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)
        self.open = 0

    def enter(self, choices: int, running: int, now: float) -> None:
        """Take `choices` more, of which `running` can run at once.

        Raises ApiError 429 when too many are open now; what would never fit is taken when nothing
        else is there.
        """
        limit = running + self._waiting
        over = self.open + choices - limit
        if over > 0 and self.open > 0:
            seconds = self._seconds_until(over, now)
            raise ApiError(
                429,
                f"{self.open} completions run or wait, and {limit} is the most: try again in "
                f"{seconds} s",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(seconds)},
            )
        self.open += choices

    def leave(self, choices: int, now: float) -> None:
        """A request of `choices` has ended."""
        self.open -= choices
        self._finishes.append((now, choices))

    def _seconds_until(self, choices: int, now: float) -> int:
        """Whole seconds in which that many should finish, by the rate of late."""
        recent = [(when, count) for when, count in self._finishes if now - when <= _WINDOW]
        if not recent:
            return 1
        rate = sum(count for _, count in recent) / max(now - recent[0][0], 1e-3)
        return min(max(math.ceil(choices / rate), 1), _LONGEST)

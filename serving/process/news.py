"""Holds back news of running streams while there is much of it, so that a message carries more.

Contract: nothing is lost, and a choice's updates keep their order. A request's first token, every
end and what comes with them are never held.
"""

from ropeway.runtime.engine.messages import Update

# What a chunk costs on its way to a client is spent once per interval and stream. It comes out of
# the engine's own cores: while one of them serves, the other's thread waits for it, and a wait over
# some microseconds costs a wake-up as well. 32 streams on 2 cores: a tenth more tokens a second at
# 60 ms than at 24.
_SECONDS_PER_CHOICE = 0.002
_MOST_SECONDS = 0.1


class HeldNews:
    """Collects updates and says which are to go now."""

    def __init__(self, interval: float | None) -> None:
        """`interval`: the most seconds that an update waits; None: by the number of choices that
        run."""
        self._interval = interval
        self._held: list[Update] = []
        self._since = 0.0  # when the oldest of them came
        self._fresh: set[str] = set()  # requests that nothing was heard of yet

    def __len__(self) -> int:
        return len(self._held)

    def expect(self, request_id: str) -> None:
        """A request was added: its first news won't wait."""
        self._fresh.add(request_id)

    def add(self, updates: list[Update], now: float, running: int) -> list[Update]:
        """Take a step's updates; those that go now, in order. `now` in seconds, `running` choices.

        Every request with news that can't wait sends all that it has.
        """
        if not self._held:
            self._since = now
        self._held += updates
        interval = self._interval
        if interval is None:
            interval = min(_SECONDS_PER_CHOICE * running, _MOST_SECONDS)
        if now - self._since >= interval:
            due, self._held = self._held, []
        else:
            urgent = {u.request_id for u in updates if self._is_urgent(u)}
            if not urgent:
                return []
            due = [u for u in self._held if u.request_id in urgent]
            self._held = [u for u in self._held if u.request_id not in urgent]
        if self._fresh:
            self._fresh.difference_update([u.request_id for u in due])
        return due

    def _is_urgent(self, update: Update) -> bool:
        return update.finish_reason is not None or update.request_id in self._fresh

    def drain(self) -> list[Update]:
        """All that is held."""
        due, self._held = self._held, []
        return due

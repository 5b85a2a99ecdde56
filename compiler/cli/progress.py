"""Progress on stderr: a bar where a person watches, a line a stage where a long run is logged."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Update = Callable[[str, int, int], None]
"""(what is being done, done, total)."""

PATIENCE = 10.0  # seconds; a run that is over sooner logs nothing


@contextmanager
def progress_bar() -> Iterator[Update]:
    """A callback that moves one bar; it disappears when the block ends."""
    if not sys.stderr.isatty():
        yield _logger(time.monotonic)
        return
    # rich takes 0.1 s to import: only where it is seen.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description:<20}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield update


def _logger(clock: Callable[[], float]) -> Update:
    """Prints what is being done, once each, from PATIENCE seconds after the start."""
    began = clock()
    shown = ""

    def update(what: str, done: int, total: int) -> None:
        nonlocal shown
        elapsed = clock() - began
        if elapsed >= PATIENCE and what != shown:
            shown = what
            print(f"{what}, after {elapsed:.0f} s", file=sys.stderr, flush=True)

    return update

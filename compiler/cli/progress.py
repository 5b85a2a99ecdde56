"""Progress bars on stderr, where a person waits; nothing at all when stderr isn't a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Update = Callable[[str, int, int], None]
"""(what is being done, done, total)."""


@contextmanager
def progress_bar() -> Iterator[Update]:
    """A callback that moves one bar; it disappears when the block ends."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
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

"""What lies in an artifact's directory, for writer and reader alike."""

import os
from collections.abc import Iterable
from pathlib import Path


def list_files(root: Path) -> Iterable[str]:
    """Every file under `root` as a relative path with forward slashes; links count as files."""
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        links = [name for name in folders if (here / name).is_symlink()]
        for name in [*files, *links]:
            yield (here / name).relative_to(root).as_posix()

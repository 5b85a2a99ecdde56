"""Artifacts of checkpoints that were given where an artifact is wanted, kept for the next time.

Contract: the cache folder is ROPEWAY_CACHE, else `ropeway` under XDG_CACHE_HOME (~/.cache). A key
says what was compiled: the checkpoint's files, the options, Ropeway's version. Processes that want
the same wait for the first; an artifact appears whole or not at all.
"""

import fcntl
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ropeway.compiler.artifact.manifest import FORMAT
from ropeway.compiler.artifact.reader import read_manifest
from ropeway.compiler.cli.progress import progress_bar
from ropeway.compiler.driver.compile import compile_model
from ropeway.compiler.driver.options import CompileOptions
from ropeway.compiler.errors import ArtifactError, InputError
from ropeway.compiler.frontend.checkpoints.hub import download
from ropeway.compiler.version import VERSION

_HASHED = 1 << 20  # bytes; a larger file is known by its size and time


def cached_artifact(model: str, options: CompileOptions) -> tuple[Path, bool]:
    """The artifact of a checkpoint (directory, .gguf file, hub name), compiled now if it must be;
    and whether it was. Raises what `compile_model` raises, InputError for an unusable folder."""
    files = Path(model) if os.path.lexists(model) else download(model)
    folder = cache_folder()
    name = re.sub(r"[^\w.-]+", "-", model if files != Path(model) else files.resolve().stem)
    path = folder / f"{name[-80:].strip('.-') or 'model'}-{_key(files, options)}.rope"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            if _usable(path):
                return path, False
            with progress_bar() as progress:
                program = compile_model(model, options, progress=progress)
                program.save(path, lambda done, total: progress("writing weights", done, total))
            return path, True
    except OSError as error:
        raise InputError(
            f"{folder}: can't be used as a cache ({error.strerror}): set ROPEWAY_CACHE to another "
            f"folder, or compile the model yourself (ropeway compile)"
        ) from error


def cache_folder() -> Path:
    """Where they are kept."""
    given = os.environ.get("ROPEWAY_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "ropeway"


def _key(model: Path, options: CompileOptions) -> str:
    digest = hashlib.sha256(repr((VERSION, FORMAT, options)).encode())
    root = model.resolve()
    files = sorted(root.rglob("*")) if root.is_dir() else [root]
    for file in files:
        if not file.is_file():
            continue
        status = file.stat()
        digest.update(repr((os.fspath(file), status.st_size)).encode())
        if status.st_size <= _HASHED:
            digest.update(file.read_bytes())
        else:
            digest.update(repr(status.st_mtime_ns).encode())
    return digest.hexdigest()[:16]


def _usable(path: Path) -> bool:
    try:
        read_manifest(path)
    except ArtifactError:
        return False
    return True


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process compiles this model: waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

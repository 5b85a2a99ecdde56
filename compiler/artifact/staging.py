"""A directory that appears whole or not at all.

Everything is written into a hidden sibling of the destination, fsynced, and put in place by one
rename; an artifact that is already there is exchanged for the new one in one system call. The
staging directory is locked for as long as its writer lives, so that what a killed writer left is
recognised and removed by the next one, and nobody removes a living writer's.
"""

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ropeway.compiler.errors import ArtifactError, RunError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def staged(path: Path, check: Callable[[Path], None]) -> Iterator[Path]:
    """A directory to fill, which becomes `path` when the block ends without an error.

    `check` refuses a `path` that mustn't be replaced; it runs before and after the block. Raises
    ArtifactError when the destination can't be written, RunError when the disk fails under way.
    """
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError("no file name holds NUL")
        path = Path(os.path.abspath(path))
        check(path)
    except (OSError, ValueError) as error:  # a name that no file can have, or no access
        raise ArtifactError(f"{str(path)!r}: can't be written ({error})") from error
    prefix = f".{path.name}.staging-"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent, prefix)
        stage, lock = _make_locked(path.parent, prefix)
    except OSError as error:
        raise ArtifactError(
            f"{path}: can't be written ({error.strerror}): choose another place"
        ) from error
    try:
        yield stage
        _sync_tree(stage)
        check(path)
        _publish(stage, path)
    except OSError as error:
        raise RunError(
            f"{path}: writing failed ({error.strerror}), nothing was changed: free some space or "
            f"choose another place"
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        os.close(lock)


def _make_locked(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new staging directory and the descriptor that locks it.

    Between its making and its locking another writer may take it for abandoned and remove it;
    then there is nothing of ours at its name any more, and we make another.
    """
    while True:
        stage = parent / (prefix + secrets.token_hex(6))
        stage.mkdir()
        try:
            lock = os.open(stage, os.O_RDONLY)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stage.exists():
            return stage, lock
        os.close(lock)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for entry in parent.iterdir():
        if not entry.name.startswith(prefix) or entry.is_symlink() or not entry.is_dir():
            continue
        try:
            lock = os.open(entry, os.O_RDONLY)
        except FileNotFoundError:
            continue  # its writer finished, or somebody else removed it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry, ignore_errors=True)
        except BlockingIOError:
            pass  # its writer is at work
        finally:
            os.close(lock)


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(stage: Path, path: Path) -> None:
    """Put `stage` in place; afterwards `stage` holds what was there before, if anything was."""
    if not path.exists():
        stage.rename(path)
    elif not _exchange(stage, path):
        # Without the system call there is a moment in which neither is at `path`; both are whole.
        old = stage.with_name(stage.name + "-old")
        path.rename(old)
        try:
            stage.rename(path)
        except OSError:
            old.rename(path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    _sync(path.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; False where kernel or file system don't know how."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    done: int = renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))

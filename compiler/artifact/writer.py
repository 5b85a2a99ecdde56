"""Writes an artifact, whole or not at all.

Contract: after `write_artifact` returns, the directory holds exactly the manifest, its seal and the
files that the manifest lists, on disk and not just in the page cache. Until then, whatever fails,
and after kill -9 too, the destination is as it was before.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ropeway.compiler.artifact.checksum import checksum_hex
from ropeway.compiler.artifact.listing import list_files
from ropeway.compiler.artifact.manifest import (
    KIND,
    MANIFEST,
    SEAL,
    FileEntry,
    Header,
    Manifest,
    check_path,
    decode,
    encode,
    seal,
)
from ropeway.compiler.artifact.staging import staged
from ropeway.compiler.artifact.weights import WeightEntry, encode_weights
from ropeway.compiler.errors import ArtifactError
from ropeway.compiler.version import VERSION

Progress = Callable[[int, int], None]
"""(weight bytes written, weight bytes in all)."""


@dataclass(frozen=True)
class ArtifactContents:
    """What goes in: a manifest whose `files` is still empty, small files, weights by file."""

    manifest: Manifest
    files: Mapping[str, bytes]
    weights: Mapping[str, Sequence[WeightEntry]]


def write_artifact(
    path: str | os.PathLike[str], contents: ArtifactContents, progress: Progress | None = None
) -> Manifest:
    """Write the artifact to `path`, replacing one that is there; returns the finished manifest.

    Weights are evaluated one at a time. Raises ArtifactError when `path` holds anything but an
    artifact or the contents contradict themselves, RunError when the disk fails.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArtifactError(f"{path!r} is no path: give the name of a directory to write")
    overlap = contents.files.keys() & contents.weights.keys()
    if overlap:
        raise ArtifactError(f"{path}: {min(overlap)} is given as a file and as weights")
    total = sum(entry.nbytes for entries in contents.weights.values() for entry in entries)
    entries: dict[str, FileEntry] = {}
    with staged(Path(path), check_replaceable) as stage:
        done = 0
        for name, weights in contents.weights.items():
            with _created(stage, name).open("xb") as file:
                digest = hashlib.sha256()
                for piece in encode_weights(weights):
                    file.write(piece)
                    digest.update(piece)
                    done += piece.nbytes
                    if progress is not None:
                        progress(min(done, total), total)
            entries[name] = _weight_entry(stage / name, digest.hexdigest())
        for name, data in contents.files.items():
            _created(stage, name).write_bytes(data)
            entries[name] = FileEntry(len(data), hashlib.sha256(data).hexdigest())
        manifest = msgspec.structs.replace(
            contents.manifest, files={name: entries[name] for name in sorted(entries)}
        )
        manifest_bytes = encode(manifest)
        decode(manifest_bytes, str(path), VERSION)  # what can't be read must not be written
        (stage / MANIFEST).write_bytes(manifest_bytes)
        (stage / SEAL).write_bytes(seal(manifest_bytes))
    return manifest


def _created(stage: Path, name: str) -> Path:
    check_path(name, str(stage))
    target = stage / name
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _weight_entry(path: Path, sha256: str) -> FileEntry:
    # Read back through the page cache rather than summed while writing: pieces aren't word aligned.
    data = np.memmap(path, dtype=np.uint8, mode="r")
    return FileEntry(data.nbytes, sha256, checksum_hex(data, threads=os.cpu_count() or 1))


def check_replaceable(path: Path) -> None:
    """Refuse to replace anything that isn't an artifact, or that holds files of someone else."""
    if not os.path.lexists(path):
        return
    advice = "choose another place, or remove it yourself"
    if path.is_symlink() or not path.is_dir():
        raise ArtifactError(f"{path}: exists and isn't an artifact: {advice}")
    try:
        text = (path / MANIFEST).read_bytes()
        header = msgspec.json.decode(text, type=Header)
        listed = msgspec.json.decode(text, type=_Listed).files
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: exists and isn't an artifact: {advice}") from error
    if header.kind != KIND:
        raise ArtifactError(f"{path}: exists and isn't an artifact: {advice}")
    strangers = sorted(set(list_files(path)) - set(listed) - {MANIFEST, SEAL})
    if strangers:
        raise ArtifactError(f"{path}/{strangers[0]}: isn't part of the artifact there: {advice}")


class _Listed(msgspec.Struct):
    """The file list of a manifest of any format."""

    files: dict[str, msgspec.Raw]

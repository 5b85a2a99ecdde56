"""Reads an artifact and believes nothing: every file is checked before anyone may use it.

Contract: an Artifact exists only if the manifest is sealed and of a known format, the directory
holds exactly the files it lists, none is reached through a link, and each has its size and sha256;
with `verify="fast"` weight files have their 64-bit checksum instead, at memory speed. Anything
else raises one ArtifactError that names the file.
"""

import hashlib
import os
import shlex
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from ropeway.compiler.artifact.checksum import WordSum, checksum_hex, word_sum
from ropeway.compiler.artifact.listing import list_files
from ropeway.compiler.artifact.manifest import (
    MANIFEST,
    SEAL,
    FileEntry,
    FunctionSpec,
    Manifest,
    decode,
    seal,
)
from ropeway.compiler.artifact.weights import Place, WeightFile
from ropeway.compiler.errors import ArtifactError, InputError
from ropeway.compiler.version import VERSION

Verify = Literal["fast", "full"]
_REPLACED_AT_MOST = 8
_COMMAND = "ropeway compile MODEL -o NAME.rope"
_SMALL = 1 << 20  # a manifest or seal beyond this is not ours


@dataclass(frozen=True)
class ArtifactFiles:
    """What an artifact holds beside its weights, checked."""

    path: Path
    manifest: Manifest
    files: Mapping[str, bytes] = field(repr=False)

    @property
    def function(self) -> FunctionSpec:
        """The only function."""
        return self.manifest.functions[0]

    def read(self, name: str) -> bytes:
        """A file's content as it was checked; weight files are in `weight_files`.

        Raises ArtifactError for a name that isn't part of the artifact.
        """
        if name not in self.files:
            raise ArtifactError(f"{self.path}/{name}: isn't part of this artifact")
        return self.files[name]

    def names(self, prefix: str = "") -> list[str]:
        """The listed files whose path begins with `prefix`, sorted."""
        return sorted(name for name in self.manifest.files if name.startswith(prefix))


@dataclass(frozen=True)
class Artifact(ArtifactFiles):
    """A checked artifact. `weight_files` are in rank order."""

    weight_files: tuple[WeightFile, ...]

    @property
    def weights(self) -> WeightFile:
        """The weights of the only rank."""
        return self.weight_files[0]


Meanwhile = Callable[[ArtifactFiles], None]
"""Works on the files, which are checked by then, while the weights are read."""


def open_artifact(
    path: str | os.PathLike[str],
    verify: Verify = "fast",
    sums: WordSum = word_sum,
    threads: int | None = None,
    place: Place | None = None,
    *,
    meanwhile: Meanwhile | None = None,
) -> Artifact:
    """Open and check the artifact at `path`.

    `verify="full"` hashes the weights with sha256 too; `sums` may be a native twin of
    `checksum.word_sum`, run on `threads` threads (default: one per core). Weights are mapped,
    unless `place` gives memory to read them into. An artifact that is replaced meanwhile is opened
    anew, and `meanwhile` called again. Raises ArtifactError.
    """
    if verify not in ("fast", "full"):
        raise InputError(f"verify: {verify!r} isn't 'fast' or 'full'")
    root = Path(path)
    for _ in range(_REPLACED_AT_MOST):
        before = _identity(root)
        try:
            return _open(
                root, verify, sums, threads or os.cpu_count() or 1, place, meanwhile=meanwhile
            )
        except ArtifactError:
            if _identity(root) == before:
                raise
    raise ArtifactError(f"{root}: was replaced {_REPLACED_AT_MOST} times while it was read")


def _identity(root: Path) -> tuple[int, int] | None:
    try:
        status = root.stat()
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _open(
    root: Path,
    verify: Verify,
    sums: WordSum,
    workers: int,
    place: Place | None,
    *,
    meanwhile: Meanwhile | None,
) -> Artifact:
    manifest = read_manifest(root)
    try:
        present = set(list_files(root)) - {MANIFEST, SEAL}
    except OSError as error:
        raise ArtifactError(f"{root}: can't be read ({error.strerror})") from error
    for name in sorted(manifest.files.keys() | present):
        if name not in present:
            raise ArtifactError(f"{root}/{name}: missing: copy the artifact again, whole")
        if name not in manifest.files:
            raise ArtifactError(f"{root}/{name}: isn't part of this artifact: remove it")
    ranks = {rank.weights: rank.rank for rank in manifest.ranks}
    small = {}
    for name, entry in manifest.files.items():
        _check_place(root, name, entry)
        if name not in ranks:
            small[name] = data = _read(root / name, entry.size)
            _compare(root / name, entry, hashlib.sha256(data).hexdigest())
        elif verify == "full":
            _compare(root / name, entry, _hash(root / name))
    files = {}
    begin = partial(meanwhile, ArtifactFiles(root, manifest, small)) if meanwhile else None
    for name in ranks:
        file = WeightFile(root / name, place, workers, begin)
        begin = None
        found = checksum_hex(file.data, sums, workers)
        if found != manifest.files[name].checksum:
            raise ArtifactError(f"{root / name}: checksum is {found}: damaged, compile it again")
        files[name] = file
    ordered = sorted(manifest.ranks, key=lambda rank: rank.rank)
    return Artifact(root, manifest, small, tuple(files[rank.weights] for rank in ordered))


def read_manifest(root: Path) -> Manifest:
    """The manifest alone, its seal checked; other files aren't looked at. Raises ArtifactError."""
    try:
        found = root.is_dir()
    except (OSError, ValueError) as error:  # a name that no file can have, or no access
        raise ArtifactError(f"{str(root)!r}: can't be read ({error})") from error
    if not found or not (os.path.lexists(root / MANIFEST) or os.path.lexists(root / SEAL)):
        raise ArtifactError(f"{root}: {_what_it_is(root)}")
    for name in (MANIFEST, SEAL):
        if (root / name).is_symlink() or not os.path.isfile(root / name):
            raise ArtifactError(
                f"{root / name}: missing: copy the artifact again, whole, or make another with "
                f"`{_COMMAND}`"
            )
    manifest_bytes = _read(root / MANIFEST, None)
    if _read(root / SEAL, None) != seal(manifest_bytes):
        raise ArtifactError(
            f"{root / MANIFEST}: doesn't match {SEAL}: one of the two is damaged or was edited; "
            f"compile the model again"
        )
    return decode(manifest_bytes, str(root / MANIFEST), VERSION)


def _what_it_is(root: Path) -> str:
    """What lies where an artifact was looked for, and how to make one of it."""
    if not root.exists():
        return f"doesn't exist: make an artifact with `{_COMMAND}`"
    command = shlex.join(["ropeway", "compile", str(root), "-o", f"{root.resolve().stem}.rope"])
    if root.is_file():
        if root.suffix == ".gguf":
            return f"this is a GGUF file: compile it first: {command}"
        return f"isn't a directory: make an artifact with `{_COMMAND}`"
    if (root / "config.json").is_file():
        return f"this is a Hugging Face checkpoint: compile it first: {command}"
    return f"this directory isn't an artifact: make one with `{_COMMAND}`"


def _check_place(root: Path, name: str, entry: FileEntry) -> None:
    """A plain file of the right size, with no link on the way to it."""
    place = root
    for part in name.split("/"):
        place = place / part
        if place.is_symlink():
            raise ArtifactError(f"{place}: is a link, which could leave the artifact: refused")
    try:
        status = place.lstat()
    except OSError as error:
        raise ArtifactError(f"{place}: can't be read ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode):
        raise ArtifactError(f"{place}: isn't a plain file: copy the artifact again, whole")
    if status.st_size != entry.size:
        raise ArtifactError(
            f"{place}: {status.st_size} bytes instead of {entry.size}: truncated or changed; copy "
            f"the artifact again, or compile the model again"
        )


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ArtifactError(f"{path}: can't be read ({error.strerror})") from error


def _read(path: Path, size: int | None) -> bytes:
    limit = _SMALL if size is None else size
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ArtifactError(f"{path}: can't be read ({error.strerror})") from error
    if len(data) > limit:
        raise ArtifactError(f"{path}: larger than {limit} bytes: damaged, compile it again")
    return data


def _compare(path: Path, entry: FileEntry, found: str) -> None:
    if found != entry.sha256:
        raise ArtifactError(
            f"{path}: sha256 is {found[:12]}..., not {entry.sha256[:12]}...: damaged or edited; "
            f"copy the artifact again, or compile the model again"
        )

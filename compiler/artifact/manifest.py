"""The manifest: what an artifact holds, in one place for writer and reader.

Contract: `manifest.json` is the canonical JSON of `Manifest`; `manifest.sha256` seals it. Fields
that this version doesn't know are refused. So a new field comes with a default, for the artifacts
that are out there, and with a new format number, for the readers that are. `Header` is the part
that every format, past and future, keeps: a reader can name the producer of what it can't read.
"""

import hashlib
from typing import Literal

import msgspec

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import ArtifactError

KIND = "ropeway-artifact"
FORMAT = 1
NumericsClass = Literal["exact", "reorder", "lossy"]
MANIFEST = "manifest.json"
SEAL = "manifest.sha256"


class Header(msgspec.Struct, frozen=True):
    """What a reader may ask of an artifact of any format. Unknown fields are allowed here only."""

    kind: str
    format: int
    producer: str = "unknown"
    command: str = "ropeway compile MODEL -o ARTIFACT"


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: its size in bytes, its sha256 (hex), and for weights a 64-bit checksum (hex)."""

    size: int
    sha256: str
    checksum: str | None = None


class ModelInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model as a user knows it; `parameters` counts the elements of its weights."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    parameters: int = 0


class PlaneSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One plane of a cache: what it stores for each token, in logical (unpadded) shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class CacheGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Caches that share slots and one block table per request.

    `bytes_per_block` is what one block takes over all `layers`, in the target's physical layout;
    `block_size` counts tokens; `window` is the sliding window in tokens, 0 for full attention.
    """

    group: int
    layers: int
    planes: tuple[PlaneSpec, ...]
    block_size: int
    bytes_per_block: int
    window: int = 0

    @property
    def bytes_per_layer_block(self) -> int:
        """Bytes that one block takes in one layer."""
        return self.bytes_per_block // self.layers

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers, padding of the layout included."""
        return self.bytes_per_block // self.block_size


class TensorInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that the runtime fills, or an output that it takes, by role. Dims: size or name."""

    name: str
    role: str
    dtype: str
    shape: tuple[int | str, ...]


class CacheInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cache that the device owns: the `layer`-th one of its group."""

    name: str
    group: int
    layer: int


class FunctionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One compiled function. `graphs` maps a bucket's name to the file with its payload."""

    name: str
    ir: str
    fingerprint: str
    inputs: tuple[TensorInput, ...]
    caches: tuple[CacheInput, ...]
    outputs: tuple[TensorInput, ...]
    graphs: dict[str, str]


class RankSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank and the file with its weights; format 1 has exactly one."""

    rank: int
    weights: str


class Numerics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may be expected of the numbers.

    `compute` is the dtype inside ops, `activations` the dtype between them. `batch_invariant` says
    that a request's tokens and logprobs are bit-equal whatever else runs beside it. `passes` is the
    weakest numerics class of the passes that ran: exact, reorder or lossy.
    """

    activations: str
    compute: str = "f32"
    batch_invariant: bool = True
    passes: NumericsClass = "reorder"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything about an artifact but its bulk. `files` lists every other file but the seal.

    `command` re-exports the artifact; `target_options` is the target's own, opaque here.
    """

    kind: str
    format: int
    producer: str
    command: str
    target: str
    dtype: str
    model: ModelInfo
    max_num_batched_tokens: int
    functions: tuple[FunctionSpec, ...]
    ranks: tuple[RankSpec, ...]
    cache_groups: tuple[CacheGroup, ...]
    buckets: tuple[Bucket, ...]
    numerics: Numerics
    files: dict[str, FileEntry]
    target_options: dict[str, int | float | str | bool] = {}


def encode(manifest: Manifest) -> bytes:
    """The canonical bytes: same manifest, same bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def seal(manifest_bytes: bytes) -> bytes:
    """The content of `manifest.sha256`, in the form that `sha256sum -c` reads."""
    return f"{hashlib.sha256(manifest_bytes).hexdigest()}  {MANIFEST}\n".encode()


def decode(manifest_bytes: bytes, where: str, reader_version: str) -> Manifest:
    """Parse and check a manifest; `where` names the file in errors.

    Raises ArtifactError for anything but a well-formed manifest of a format that this one reads.
    """
    try:
        header = msgspec.json.decode(manifest_bytes, type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"{where}: not the manifest of a Ropeway artifact ({error}): compile the model again"
        ) from error
    if header.kind != KIND:
        raise ArtifactError(f"{where}: kind is {header.kind!r}, not {KIND!r}: not an artifact")
    if header.format != FORMAT:
        raise ArtifactError(
            f"{where}: format {header.format}, written by ropeway {header.producer}, but this is "
            f"ropeway {reader_version}, which reads format {FORMAT}: export it again with "
            f"`{header.command}`"
        )
    try:
        manifest = msgspec.json.decode(manifest_bytes, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"{where}: {error}; written by ropeway {header.producer}, read by {reader_version}: "
            f"export it again with `{header.command}`"
        ) from error
    _check(manifest, where)
    return manifest


def _check(manifest: Manifest, where: str) -> None:
    """Rules that types don't express."""
    if len(manifest.functions) != 1 or len(manifest.ranks) != 1:
        raise ArtifactError(
            f"{where}: {len(manifest.functions)} functions and {len(manifest.ranks)} ranks, but "
            f"format {FORMAT} holds one of each: compile the model again"
        )
    for path in manifest.files:
        check_path(path, where)
    named = [rank.weights for rank in manifest.ranks]
    for function in manifest.functions:
        named += [function.ir, *function.graphs.values()]
    for path in named:
        if path not in manifest.files:
            raise ArtifactError(f"{where}: names {path!r}, which isn't in its list of files")
    for rank in manifest.ranks:
        if manifest.files[rank.weights].checksum is None:
            raise ArtifactError(f"{where}: {rank.weights} has no checksum: compile the model again")
    for group in manifest.cache_groups:
        if min(group.layers, group.block_size, group.bytes_per_block) < 1 or group.window < 0:
            raise ArtifactError(f"{where}: cache group {group.group} has a size below 1")


def check_path(path: str, where: str) -> None:
    """Refuse a path that could leave the artifact: absolute, with `..`, or not in plain form."""
    parts = path.split("/")
    if "\\" in path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ArtifactError(
            f"{where}: the file path {path!r} isn't a plain relative one, so it could leave the "
            f"artifact: don't trust this artifact, compile the model again"
        )
    if path in (MANIFEST, SEAL):
        raise ArtifactError(f"{where}: lists {path!r} among its files; it can't hold its own hash")

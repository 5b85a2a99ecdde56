"""The reports that an artifact carries for people; the runtime never reads them.

`reports/passes.json` belongs to the pipeline, which writes and reads it; `reports/memory.json` is
here.
"""

import msgspec

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import ArtifactError

PASSES_FILE = "reports/passes.json"
MEMORY_FILE = "reports/memory.json"


class BucketReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one bucket's step needs beside weights and caches: `arena_bytes` for its `buffers`.

    `without_reuse_bytes` is what they would take if no two shared memory.
    """

    bucket: Bucket
    arena_bytes: int
    buffers: int
    without_reuse_bytes: int


class MemoryReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory by bucket; `weight_bytes` are those of the weight files, packed."""

    weight_bytes: int
    buckets: tuple[BucketReport, ...] = ()

    def to_json(self) -> bytes:
        """The file's bytes."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def from_json(cls, data: bytes) -> "MemoryReport":
        """Raises ArtifactError for data of another shape."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ArtifactError(f"{MEMORY_FILE}: not a memory report ({error})") from error

"""The artifact on disk: manifest, reader, checksums. Needs numpy and msgspec only.

Writing is apart, in `writer`: who serves an artifact doesn't import it.
"""

from ropeway.compiler.artifact.manifest import Manifest
from ropeway.compiler.artifact.reader import Artifact, open_artifact, read_manifest
from ropeway.compiler.artifact.weights import WeightEntry, WeightFile

__all__ = [
    "Artifact",
    "Manifest",
    "WeightEntry",
    "WeightFile",
    "open_artifact",
    "read_manifest",
]

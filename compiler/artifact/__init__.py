"""The artifact on disk: manifest, writer, reader, checksums. Needs numpy and msgspec only."""

from ropeway.compiler.artifact.manifest import Manifest
from ropeway.compiler.artifact.reader import Artifact, open_artifact, read_manifest
from ropeway.compiler.artifact.weights import WeightEntry, WeightFile
from ropeway.compiler.artifact.writer import ArtifactContents, write_artifact

__all__ = [
    "Artifact",
    "ArtifactContents",
    "Manifest",
    "WeightEntry",
    "WeightFile",
    "open_artifact",
    "read_manifest",
    "write_artifact",
]

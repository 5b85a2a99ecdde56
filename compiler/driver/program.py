"""A compiled program: fresh from `compile`, or loaded from an artifact. One class for both.

A program is the contents of an artifact, in memory or mapped; it can be saved, explained and given
to LLM. Importing this module imports neither torch nor sympy; only `module` does.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ropeway.compiler.artifact.manifest import Manifest
from ropeway.compiler.artifact.reader import Artifact, Verify, open_artifact
from ropeway.compiler.artifact.reports import PASSES_FILE
from ropeway.compiler.artifact.weights import StoredTensor, WeightEntry, WeightFile
from ropeway.compiler.artifact.writer import ArtifactContents, Progress, write_artifact
from ropeway.compiler.driver.explain import explain
from ropeway.compiler.pipeline.report import Report
from ropeway.runtime.checksum import fastest_word_sum
from ropeway.runtime.text.assets import SETTINGS_FILE, TokenizerSettings, read_settings

if TYPE_CHECKING:
    from ropeway.compiler.ir.graph import Module


class Program:
    """A program and what it needs to run. `artifact` is the open artifact it came from, if any."""

    def __init__(self, contents: ArtifactContents, artifact: Artifact | None = None) -> None:
        self._contents = contents
        self.artifact = artifact

    @classmethod
    def of(cls, artifact: Artifact) -> "Program":
        """The program of an open artifact; weights stay mapped."""
        manifest = artifact.manifest
        weights = {
            rank.weights: [_stored(file, *item) for item in file.tensors.items()]
            for rank, file in zip(manifest.ranks, artifact.weight_files, strict=True)
        }
        files = {name: artifact.read(name) for name in manifest.files if name not in weights}
        return cls(ArtifactContents(manifest, files, weights), artifact)

    @property
    def metadata(self) -> Manifest:
        """The manifest; `files` is empty until the program was saved."""
        return self._contents.manifest

    @property
    def tokenizer(self) -> TokenizerSettings | None:
        """The settings of its tokenizer, chat template included; None where it has none."""
        data = self._contents.files.get(f"tokenizer/{SETTINGS_FILE}")
        return None if data is None else read_settings(data)

    @property
    def report(self) -> Report:
        """What the passes did."""
        return Report.from_json(self._contents.files[PASSES_FILE])

    @property
    def module(self) -> "Module":
        """The IR, parsed from its text. Needs the extra `compile`."""
        from ropeway.compiler.extras import require  # noqa: PLC0415
        from ropeway.compiler.ir.parser import parse_module  # noqa: PLC0415

        require("a program's module", "sympy")
        text = self._contents.files[self._contents.manifest.functions[0].ir]
        return parse_module(text.decode())

    def save(self, path: str | os.PathLike[str], progress: Progress | None = None) -> Path:
        """Write the artifact to `path`, whole or not at all, replacing an artifact there.

        Raises ArtifactError when `path` holds anything else or can't be written; CheckpointError
        when a weight can't be read from the checkpoint any more.
        """
        manifest = write_artifact(path, self._contents, progress)
        self._contents = replace(self._contents, manifest=manifest)
        return Path(path)

    def explain(self, available: int | None = None, *, every_bucket: bool = False) -> str:
        """What was fused where, what wasn't and why, memory, and KV bytes per token, as text.

        With `available` (bytes of memory for KV blocks) also how many sequences fit; memory of the
        smallest and largest bucket, or of `every_bucket`.
        """
        contents = self._contents
        return explain(contents.manifest, contents.files, available, every_bucket=every_bucket)

    def __repr__(self) -> str:
        manifest = self._contents.manifest
        return f"<program {manifest.model.name}: {manifest.target}, {manifest.dtype}>"


def load(path: str | os.PathLike[str], verify: Verify = "fast") -> Program:
    """Open an artifact and check all of it. Raises ArtifactError naming the file that is damaged.

    With `verify="full"` the weights are hashed with sha256; "fast" checks them at memory speed.
    """
    return Program.of(open_artifact(path, verify, fastest_word_sum()))


def _stored(file: WeightFile, name: str, stored: StoredTensor) -> WeightEntry:
    return WeightEntry(name, stored.dtype, stored.shape, lambda: file.view(name))

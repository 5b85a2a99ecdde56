"""Manifests that are sealed rightly and contradict the program: refused before anything runs."""

import shutil
from pathlib import Path

import msgspec
import pytest

import ropeway
from ropeway.compiler.artifact.manifest import MANIFEST, SEAL, Manifest, encode, seal
from ropeway.compiler.errors import ArtifactError

CORPUS = Path(__file__).parent / "corpus" / "format-1.rope"


def _resealed(folder: Path, **model: int) -> Path:
    path = folder / "changed.rope"
    shutil.copytree(CORPUS, path)
    manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    manifest = msgspec.structs.replace(
        manifest, model=msgspec.structs.replace(manifest.model, **model)
    )
    data = encode(manifest)
    (path / MANIFEST).write_bytes(data)
    (path / SEAL).write_bytes(seal(data))
    return path


@pytest.mark.parametrize("size", [0, 1, 259, 261, 10**6, -5])
def test_a_vocabulary_that_the_plan_does_not_compute(size: int, tmp_path: Path) -> None:
    """The sampler trusts the size: one too large would read and write beyond a row."""
    with pytest.raises(ArtifactError, match="vocab_size"):
        ropeway.LLM(_resealed(tmp_path, vocab_size=size))


@pytest.mark.parametrize("length", [0, -1, 10**6, 2**62])
def test_a_length_that_the_plan_does_not_hold(length: int, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="max_model_len"):
        ropeway.LLM(_resealed(tmp_path, max_model_len=length))


def test_the_unchanged_manifest_loads(tmp_path: Path) -> None:
    with ropeway.LLM(_resealed(tmp_path)) as llm:
        assert llm.vocab_size == 260

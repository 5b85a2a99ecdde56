"""One tiny artifact, compiled by the command."""

from pathlib import Path

import pytest
from support.command import ropeway
from support.tiny_checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def tiny_artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled in float32, so that its likeliest tokens are those of transformers in float32."""
    artifact = tmp_path_factory.mktemp("artifact") / "tiny.rope"
    options = ("--dtype", "float32", "--max-num-batched-tokens", 64)
    done = ropeway("compile", tiny_checkpoint, "-o", artifact, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.endswith(f"ropeway chat {artifact}\n"), done.stderr
    return artifact

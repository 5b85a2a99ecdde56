"""The model that the shared server serves, offline; and one whose answers can be long."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tiny_checkpoint import make_checkpoint

import ropeway
from ropeway import LLM


@pytest.fixture(scope="session")
def offline(tiny_artifact: Path) -> Iterator[LLM]:
    """The same artifact without any server."""
    with LLM(tiny_artifact, num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="session")
def long_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model for 20,000 tokens: prompts and answers that take as long as a test wants."""
    folder = tmp_path_factory.mktemp("long")
    checkpoint = make_checkpoint(folder / "long", max_position_embeddings=20_000)
    ropeway.compile(checkpoint, dtype="float32", max_num_batched_tokens=64).save(folder / "l.rope")
    return folder / "l.rope"

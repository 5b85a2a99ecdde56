"""A tiny chat model behind a real server process."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.server import RunningServer, running_server
from support.tiny_checkpoint import make_checkpoint

import ropeway


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a byte, a chat template, up to 512 tokens."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    return make_checkpoint(folder, max_position_embeddings=512)


@pytest.fixture(scope="session")
def tiny_artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It, compiled in float32."""
    path = tmp_path_factory.mktemp("artifact") / "tiny.rope"
    ropeway.compile(tiny_checkpoint, dtype="float32", max_num_batched_tokens=64).save(path)
    return path


@pytest.fixture(scope="session")
def server(tiny_artifact: Path) -> Iterator[RunningServer]:
    """The server that most tests share: don't end it, don't leave requests running."""
    with running_server(tiny_artifact) as running:
        yield running


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    """A client of it."""
    with server.client() as client:
        yield client

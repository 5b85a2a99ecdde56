"""Writing is all or nothing, and never at the expense of something else."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ropeway.compiler.artifact.reader import open_artifact
from ropeway.compiler.artifact.weights import WeightEntry
from ropeway.compiler.artifact.writer import ArtifactContents, write_artifact
from ropeway.compiler.errors import ArtifactError

Make = Callable[[Path], Path]


def with_loader(contents: ArtifactContents, load: Callable[[], bytes]) -> ArtifactContents:
    entry = WeightEntry("w", "u8", (64,), load)
    return ArtifactContents(
        contents.manifest, contents.files, {"weights/model.safetensors": [entry]}
    )


def test_a_failure_leaves_nothing(tmp_path: Path, contents: ArtifactContents) -> None:
    def fail() -> bytes:
        raise ValueError("the checkpoint broke")

    with pytest.raises(ValueError, match="the checkpoint broke"):
        write_artifact(tmp_path / "a.rope", with_loader(contents, fail))
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_old_artifact(
    tmp_path: Path, make: Make, contents: ArtifactContents
) -> None:
    root = make(tmp_path / "a.rope")

    def fail() -> bytes:
        raise ValueError("the checkpoint broke")

    with pytest.raises(ValueError, match="broke"):
        write_artifact(root, with_loader(contents, fail))
    assert open_artifact(root).weights.view("first")[0, 1] == 1.0
    assert list(tmp_path.iterdir()) == [root]


def test_an_artifact_is_replaced(tmp_path: Path, make: Make, contents: ArtifactContents) -> None:
    root = make(tmp_path / "a.rope")
    write_artifact(root, with_loader(contents, lambda: bytes(range(64))))
    assert open_artifact(root).weights.view("w")[63] == 63
    assert list(tmp_path.iterdir()) == [root]


def test_a_reader_keeps_what_it_opened(
    tmp_path: Path, make: Make, contents: ArtifactContents
) -> None:
    root = make(tmp_path / "a.rope")
    reader = open_artifact(root)
    write_artifact(root, with_loader(contents, lambda: bytes(64)))
    assert reader.weights.view("first")[2, 6] == 20.0


@pytest.mark.parametrize("kind", ["folder", "empty", "file", "link", "foreign"])
def test_never_overwrites_anything_else(
    tmp_path: Path, make: Make, contents: ArtifactContents, kind: str
) -> None:
    path = tmp_path / "a.rope"
    if kind == "folder":
        path.mkdir()
        (path / "thesis.tex").write_text("years of work")
    elif kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.write_text("years of work")
    elif kind == "link":
        path.symlink_to(make(tmp_path / "b.rope"))
    else:
        make(path)
        (path / "notes.txt").write_text("years of work")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ArtifactError, match=r"a\.rope"):
        write_artifact(path, contents)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_that_cannot_be_written(tmp_path: Path, contents: ArtifactContents) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="can't be written"):
        write_artifact(tmp_path / "file" / "a.rope", contents)


KILLED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from conftest import make_contents
from ropeway.compiler.artifact.weights import WeightEntry
from ropeway.compiler.artifact.writer import ArtifactContents, write_artifact
contents = make_contents()
def load():
    print("writing", flush=True)
    time.sleep(60)
entries = [WeightEntry("a", "u8", (64,), lambda: bytes(64)), WeightEntry("b", "u8", (64,), load)]
write_artifact(sys.argv[2], ArtifactContents(
    contents.manifest, contents.files, {"weights/model.safetensors": entries}))
"""


@pytest.mark.parametrize("existing", [False, True])
def test_kill_9_while_writing(tmp_path: Path, make: Make, existing: bool) -> None:
    root = tmp_path / "a.rope"
    if existing:
        make(root)
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(root)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    staging = [path for path in tmp_path.iterdir() if path != root]
    assert len(staging) == 1
    make(tmp_path / "other.rope")
    make(root)  # another writer of the same place leaves the living one's staging alone
    assert staging[0].exists()
    os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=10)
    open_artifact(root)
    make(root)
    deadline = time.monotonic() + 5
    while staging[0].exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sorted(tmp_path.iterdir()) == [root, tmp_path / "other.rope"]

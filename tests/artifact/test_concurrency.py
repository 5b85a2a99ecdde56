"""Several writers of one path, readers while it is replaced: all of them see a whole artifact."""

import threading
from pathlib import Path

import pytest

from ropeway.compiler.artifact.reader import open_artifact
from ropeway.compiler.artifact.writer import ArtifactContents, write_artifact
from ropeway.compiler.errors import ArtifactError


def _run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def _variant(contents: ArtifactContents, number: int) -> ArtifactContents:
    """The same artifact with IR text of another length."""
    files = {**contents.files, "ir/step.ir": b"module @tiny format 1 {}\n" + b"\n" * number}
    return ArtifactContents(contents.manifest, files, contents.weights)


def test_many_writers_of_one_path_all_succeed(contents: ArtifactContents, tmp_path: Path) -> None:
    path = tmp_path / "one.rope"
    errors: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for round_ in range(12):
                write_artifact(path, _variant(contents, number * 20 + round_))
        except BaseException as error:
            errors.append(error)

    _run_all([threading.Thread(target=write, args=(number,)) for number in range(4)])
    assert errors == []
    assert open_artifact(path).read("ir/step.ir").startswith(b"module @tiny")
    assert [entry.name for entry in tmp_path.iterdir()] == ["one.rope"]  # no litter


def test_a_reader_never_sees_half_of_a_replacement(
    contents: ArtifactContents, tmp_path: Path
) -> None:
    path = tmp_path / "one.rope"
    write_artifact(path, contents)
    stop = threading.Event()

    def replace() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            write_artifact(path, _variant(contents, number % 50))

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        for _ in range(150):
            text = open_artifact(path).read("ir/step.ir")
            assert text.startswith(b"module @tiny") and len(text) >= 25
    finally:
        stop.set()
        writer.join(60)


@pytest.mark.parametrize("path", ["a\0b", "\ud800", 5, None, "x" * 5000])
def test_names_that_no_directory_can_have_are_refused(
    contents: ArtifactContents, path: object
) -> None:
    with pytest.raises(ArtifactError):
        write_artifact(path, contents)  # type: ignore[arg-type]
    if isinstance(path, str):
        with pytest.raises(ArtifactError):
            open_artifact(path)

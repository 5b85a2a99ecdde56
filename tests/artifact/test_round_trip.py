"""What is written is read back: bytes, tensors, manifest; and other readers can read it too."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropeway.compiler.artifact import weights
from ropeway.compiler.artifact.checksum import STEP, checksum64, word_sum
from ropeway.compiler.artifact.reader import ArtifactFiles, open_artifact
from ropeway.compiler.artifact.weights import WeightEntry, WeightFile, encode_weights
from ropeway.compiler.artifact.writer import ArtifactContents, write_artifact
from ropeway.compiler.errors import ArtifactError

Make = Callable[[Path], Path]


@pytest.mark.parametrize("verify", ["fast", "full"])
def test_reads_back_what_was_written(tmp_path: Path, make: Make, verify: str) -> None:
    artifact = open_artifact(make(tmp_path / "a.rope"), verify=verify)
    assert artifact.read("ir/step.ir") == b"module @tiny format 1 {}\n"
    first = artifact.weights.view("first")
    assert first.dtype == np.float32
    np.testing.assert_array_equal(first, np.arange(21, dtype=np.float32).reshape(3, 7))
    assert artifact.weights.view("second").tolist() == [0, 1, 2, 3, 4]
    assert artifact.manifest.model.vocab_size == 11
    assert artifact.manifest.cache_groups[0].bytes_per_token == 8
    assert artifact.names("graphs/") == ["graphs/decode-1.json"]


def test_tensor_data_is_aligned(tmp_path: Path, make: Make) -> None:
    weights = open_artifact(make(tmp_path / "a.rope")).weights
    for name, stored in weights.tensors.items():
        assert (weights.address + stored.offset) % 64 == 0, name
        assert weights.view(name).ctypes.data == weights.address + stored.offset


def test_weight_file_is_safetensors_for_others(tmp_path: Path, make: Make) -> None:
    numpy_reader = pytest.importorskip("safetensors")
    path = make(tmp_path / "a.rope") / "weights/model.safetensors"
    with numpy_reader.safe_open(path, framework="numpy") as file:
        np.testing.assert_array_equal(
            file.get_tensor("first"), np.arange(21, dtype=np.float32).reshape(3, 7)
        )
        assert file.get_slice("second").get_shape() == [5]


def test_seal_is_what_sha256sum_reads(tmp_path: Path, make: Make) -> None:
    root = make(tmp_path / "a.rope")
    digest = hashlib.sha256((root / "manifest.json").read_bytes()).hexdigest()
    assert (root / "manifest.sha256").read_text() == f"{digest}  manifest.json\n"
    listed = json.loads((root / "manifest.json").read_text())["files"]
    for name, entry in listed.items():
        data = (root / name).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert entry["size"] == len(data)


def test_same_contents_same_bytes(tmp_path: Path, make: Make) -> None:
    one, two = make(tmp_path / "a.rope"), make(tmp_path / "b.rope")
    for path in one.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (two / path.relative_to(one)).read_bytes()


def test_weights_are_loaded_one_at_a_time() -> None:
    """Streaming: a tensor is asked for when its turn comes, not when writing begins."""
    asked: list[str] = []

    def entry(name: str) -> WeightEntry:
        return WeightEntry(name, "u8", (64,), lambda: asked.append(name) or bytes(64))

    pieces = encode_weights([entry("a"), entry("b")])
    next(pieces)
    assert asked == []
    next(pieces)
    assert asked == ["a"]


def test_wrong_data_size_is_refused(tmp_path: Path, contents: ArtifactContents) -> None:
    bad = {"weights/model.safetensors": [WeightEntry("w", "f32", (3,), lambda: bytes(8))]}
    with pytest.raises(ArtifactError, match=r"'w': 8 bytes of data, but f32\[3\] takes 12"):
        write_artifact(
            tmp_path / "a.rope", ArtifactContents(contents.manifest, contents.files, bad)
        )
    assert list(tmp_path.iterdir()) == []


def definition(data: bytes) -> int:
    """The checksum as its module defines it, a word at a time in Python integers."""
    total = len(data)
    for index in range((len(data) + 7) // 8):
        word = int.from_bytes(data[index * 8 : index * 8 + 8], "little")
        total += (word ^ (word >> 32)) * (1 + index * STEP)
    return total % 2**64


@given(st.binary(max_size=200))
def test_checksum_follows_its_definition(data: bytes) -> None:
    assert checksum64(np.frombuffer(data, np.uint8)) == definition(data)


def test_checksum_across_chunks_and_threads() -> None:
    data = np.random.default_rng(3).integers(0, 256, (8 << 20) + 262_144 + 5, dtype=np.uint8)
    expected = definition(data.tobytes())
    assert checksum64(data) == expected
    assert checksum64(data, threads=2) == expected
    middle = 40 * 8
    parts = word_sum(data[:middle], 0) + word_sum(data[middle:], middle // 8)
    assert (data.nbytes + parts) % 2**64 == expected


def test_checksum_sees_pairs_of_high_bits_and_exchanged_words() -> None:
    words = np.arange(64, dtype=np.uint64)
    before = checksum64(words.view(np.uint8))
    flipped = words.copy()
    flipped[[3, 40]] ^= np.uint64(1 << 63)
    assert checksum64(flipped.view(np.uint8)) != before
    exchanged = words.copy()
    exchanged[[3, 40]] = exchanged[[40, 3]]
    assert checksum64(exchanged.view(np.uint8)) != before


def test_views_outlive_the_artifact(tmp_path: Path, make: Make) -> None:
    view = WeightFile(make(tmp_path / "a.rope") / "weights/model.safetensors").view("first")
    assert view[2, 6] == 20.0


def test_weights_read_into_given_memory_survive_the_file(tmp_path: Path, make: Make) -> None:
    path = make(tmp_path / "a.rope") / "weights/model.safetensors"
    given: list[np.ndarray] = []

    def place(size: int) -> np.ndarray:
        given.append(np.zeros(size, np.uint8))
        return given[-1]

    mapped = WeightFile(path)
    read = WeightFile(path, place, threads=2)
    assert [memory.nbytes for memory in given] == [path.stat().st_size]
    assert read.address == given[0].ctypes.data
    assert read.tensors == mapped.tensors
    assert read.data.tobytes() == path.read_bytes()
    assert not read.data.flags.writeable
    path.write_bytes(b"")
    assert read.view("first")[2, 6] == 20.0


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("beside", [64, 192, 1 << 20])
def test_weights_are_whole_whatever_part_is_read_beside_other_work(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch, threads: int, beside: int
) -> None:
    monkeypatch.setattr(weights, "_READ", 64)
    monkeypatch.setattr(weights, "_MEANWHILE", beside)
    path = make(tmp_path / "a.rope") / "weights/model.safetensors"
    calls: list[int] = []
    read = WeightFile(path, lambda size: np.zeros(size, np.uint8), threads, lambda: calls.append(1))
    assert read.data.tobytes() == path.read_bytes()
    assert calls == [1]
    WeightFile(path, None, threads, lambda: calls.append(2))
    assert calls == [1, 2]


def test_checked_files_are_there_while_weights_are_read(tmp_path: Path, make: Make) -> None:
    seen: list[ArtifactFiles] = []
    artifact = open_artifact(make(tmp_path / "a.rope"), meanwhile=seen.append)
    [files] = seen
    assert type(files) is ArtifactFiles
    assert (files.path, files.manifest) == (artifact.path, artifact.manifest)
    assert files.read("ir/step.ir") == artifact.read("ir/step.ir") != b""
    weight_file = tmp_path / "a.rope/weights/model.safetensors"
    data = bytearray(weight_file.read_bytes())
    data[-1] ^= 1
    weight_file.write_bytes(data)
    with pytest.raises(ArtifactError, match="checksum"):
        open_artifact(tmp_path / "a.rope", meanwhile=seen.append)
    assert len(seen) == 2

"""Any damage gives one ArtifactError that names the file; nothing else is raised, nothing loads."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ropeway.compiler.artifact.reader import open_artifact
from ropeway.compiler.errors import ArtifactError

Make = Callable[[Path], Path]
FILES = [
    "manifest.json",
    "manifest.sha256",
    "ir/step.ir",
    "graphs/decode-1.json",
    "weights/model.safetensors",
]


def reseal(root: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Edit the manifest as a careful forger would: the seal fits afterwards."""
    manifest = json.loads((root / "manifest.json").read_text())
    change(manifest)
    text = json.dumps(manifest).encode()
    (root / "manifest.json").write_bytes(text)
    (root / "manifest.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")


def refused(root: Path, *words: str, verify: str = "fast") -> str:
    with pytest.raises(ArtifactError) as caught:
        open_artifact(root, verify=verify)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("verify", ["fast", "full"])
def test_every_flipped_byte_is_found(tmp_path: Path, make: Make, name: str, verify: str) -> None:
    """Every byte of the small files, each in one bit that walks with the position."""
    root = make(tmp_path / "a.rope")
    good = (root / name).read_bytes()
    named = "manifest" if name.startswith("manifest") else name
    for offset in range(0, len(good), 1 if len(good) < 700 else 3):
        bad = bytearray(good)
        bad[offset] ^= 1 << (offset % 8)
        (root / name).write_bytes(bad)
        refused(root, named, verify=verify)
    (root / name).write_bytes(good)
    open_artifact(root)


@pytest.mark.parametrize("name", FILES)
def test_missing_file(tmp_path: Path, make: Make, name: str) -> None:
    root = make(tmp_path / "a.rope")
    (root / name).unlink()
    refused(root, name, "missing")


@pytest.mark.parametrize("name", FILES)
def test_truncated_and_grown_file(tmp_path: Path, make: Make, name: str) -> None:
    root = make(tmp_path / "a.rope")
    good = (root / name).read_bytes()
    named = "manifest" if name.startswith("manifest") else name
    for bad in (good[:-1], good[: len(good) // 2], b"", good + b"\0"):
        (root / name).write_bytes(bad)
        refused(root, named)


def test_extra_file(tmp_path: Path, make: Make) -> None:
    root = make(tmp_path / "a.rope")
    (root / "graphs/evil.json").write_text("{}")
    refused(root, "graphs/evil.json", "isn't part of this artifact")


def test_no_artifact_at_all(tmp_path: Path) -> None:
    refused(tmp_path / "none.rope", "none.rope", "doesn't exist", "ropeway compile")
    (tmp_path / "file.rope").write_text("x")
    refused(tmp_path / "file.rope", "isn't a directory")
    (tmp_path / "a model.gguf").write_bytes(b"GGUF")
    command = f"ropeway compile '{tmp_path}/a model.gguf' -o 'a model.rope'"
    refused(tmp_path / "a model.gguf", "is a GGUF file", f"compile it first: {command}")
    refused(tmp_path, str(tmp_path), "isn't an artifact", "ropeway compile MODEL")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "a Hugging Face checkpoint", f"ropeway compile {tmp_path} -o")


def test_unknown_format_names_producer_and_command(tmp_path: Path, make: Make) -> None:
    root = make(tmp_path / "a.rope")

    def from_the_future(manifest: dict[str, object]) -> None:
        manifest |= {"format": 7, "producer": "9.4.2", "new_field": [1]}

    reseal(root, from_the_future)
    refused(root, "format 7", "ropeway 9.4.2", "`ropeway compile tiny -o tiny.rope`", "0.1.0")


def test_unknown_field_is_refused(tmp_path: Path, make: Make) -> None:
    root = make(tmp_path / "a.rope")
    reseal(root, lambda manifest: manifest.update(extra=1))
    refused(root, "manifest.json", "extra")


@pytest.mark.parametrize(
    "path",
    ["../outside.txt", "/etc/hostname", "ir/../../outside.txt", "ir//x", "./x", "", "a\\..\\b"],
)
def test_escaping_path(tmp_path: Path, make: Make, path: str) -> None:
    root = make(tmp_path / "a.rope")
    (tmp_path / "outside.txt").write_text("secret")
    entry = {"size": 6, "sha256": hashlib.sha256(b"secret").hexdigest(), "checksum": None}
    reseal(root, lambda manifest: manifest["files"].update({path: entry}))
    refused(root, repr(path), "plain relative")


def test_a_link_out_of_the_artifact(tmp_path: Path, make: Make) -> None:
    root = make(tmp_path / "a.rope")
    moved = tmp_path / "step.ir"
    (root / "ir/step.ir").rename(moved)
    (root / "ir/step.ir").symlink_to(moved)
    refused(root, "ir/step.ir", "link")
    (root / "ir/step.ir").unlink()
    (root / "ir").rmdir()
    (root / "ir").symlink_to(tmp_path)
    refused(root, "ir")


def test_a_weight_header_that_lies(tmp_path: Path, make: Make) -> None:
    """With every hash right, the header parser still refuses what doesn't fit the file."""
    root = make(tmp_path / "a.rope")
    path = root / "weights/model.safetensors"
    good = path.read_bytes()
    for old, new in [
        (b'"shape":[3,7]', b'"shape":[3,8]'),
        (b'"data_offsets":[0,84]', b'"data_offsets":[8,92]'),
        (b'"dtype":"F32"', b'"dtype":"F99"'),
        (good[:8], (1 << 60).to_bytes(8, "little")),
        (b'"__metadata__"', b'"__netadata__"'),
    ]:
        assert old in good
        bad = good.replace(old, new, 1)
        path.write_bytes(bad)

        def fit(manifest: dict[str, object], data: bytes = bad) -> None:
            entry = manifest["files"]["weights/model.safetensors"]
            entry["sha256"] = hashlib.sha256(data).hexdigest()

        reseal(root, fit)
        refused(root, "weights/model.safetensors")


def test_a_real_artifact_at_sampled_offsets(tmp_path: Path) -> None:
    """Every file of a compiled artifact, at its ends and at offsets in between."""
    root = tmp_path / "copy.rope"
    shutil.copytree(Path(__file__).parent / "corpus" / "format-1.rope", root)
    names = sorted(path for path in root.rglob("*") if path.is_file())
    assert len(names) > 10
    for path in names:
        good = path.read_bytes()
        relative = path.relative_to(root).as_posix()
        named = "manifest" if relative.startswith("manifest") else relative
        for offset in {*range(0, len(good), max(1, len(good) // 13)), len(good) - 1}:
            bad = bytearray(good)
            bad[offset] ^= 1 << (offset % 8)
            path.write_bytes(bad)
            refused(root, named)
        path.write_bytes(good[:-1])
        refused(root, named)
        path.unlink()
        refused(root, named)
        path.write_bytes(good)
    open_artifact(root, verify="full")

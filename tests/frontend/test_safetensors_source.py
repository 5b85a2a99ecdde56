"""safetensors headers: every way in which one can lie is refused with the file's name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ropeway.compiler.errors import CheckpointError
from ropeway.compiler.frontend.checkpoints.safetensors_source import SafetensorsSource

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.tensor([[1], [0]], dtype=torch.bool),
    "none": torch.empty(0, 4),
}


def saved(folder: Path, name: str = "m.safetensors") -> Path:
    save_file(TENSORS, folder / name, metadata={"format": "pt"})
    return folder / name


def test_values_are_those_saved(tmp_path: Path) -> None:
    source = SafetensorsSource([saved(tmp_path)])
    assert set(source.names()) == set(TENSORS)
    assert source.info("b") == ("bf16", (2,))
    for name, tensor in TENSORS.items():
        assert torch.equal(source.get(name), tensor)
        assert source.get(name).dtype == tensor.dtype


def rewrite(change: Callable[[dict[str, dict[str, object]]], None]) -> Callable[[bytes], bytes]:
    """Damage that edits the header and keeps the data."""

    def damage(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    return damage


def duplicate(data: bytes) -> bytes:
    size = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + size].rstrip()
    entry = json.dumps(json.loads(text)["a"])
    text = text[:-1] + b', "a": ' + entry.encode() + b"}"
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "seven bytes": lambda data: data[:7],
    "half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "huge header": lambda data: b"\xff" * 8 + data[8:],
    "no JSON": lambda data: data[:8] + b"[" + data[9:],
    "a list": lambda data: (2).to_bytes(8, "little") + b"[]",
    "a name twice": duplicate,
    "an unknown type": rewrite(lambda header: header["a"].update(dtype="Q9")),
    "a negative size": rewrite(lambda header: header["a"].update(shape=[-2, -3])),
    "another shape": rewrite(lambda header: header["a"].update(shape=[2, 4])),
    "overlap": rewrite(lambda header: header["c"].update(data_offsets=[0, 2])),
    "no offsets": rewrite(lambda header: header["a"].pop("data_offsets")),
    "a missing tensor": rewrite(lambda header: header.pop("b")),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused(kind: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    path.write_bytes(DAMAGE[kind](data))
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        SafetensorsSource([path])


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"two\.safetensors.*one\.safetensors"):
        SafetensorsSource([saved(tmp_path, "one.safetensors"), saved(tmp_path, "two.safetensors")])


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no\.safetensors"):
        SafetensorsSource([tmp_path / "no.safetensors"])

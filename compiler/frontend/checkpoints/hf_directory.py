"""A Hugging Face directory: config.json, safetensors by index or as they are, tokenizer files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropeway.compiler.errors import CheckpointError
from ropeway.compiler.frontend.checkpoints.safetensors_source import SafetensorsSource

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_SMALL = 1 << 28


@dataclass(frozen=True)
class HfDirectory:
    """An opened directory: the config's content and the tensors, headers checked."""

    path: Path
    config: dict[str, Any]
    tensors: SafetensorsSource


def label(path: Path) -> str:
    """A directory in messages: its name alone, which "." hasn't."""
    return path.name or str(path)


def open_directory(path: Path) -> HfDirectory:
    """Opens a directory. Raises CheckpointError for anything missing, damaged or quantized."""
    config = read_json(path / "config.json")
    quantization = config.get("quantization_config")
    if quantization:
        kind = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"{label(path)}/config.json: the checkpoint is quantized ({kind}), which isn't "
            "supported; give the original in float32, bfloat16 or float16"
        )
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(
            f"{label(path)}/config.json: 'model_type' is {kind!r}; expected the architecture's name"
        )
    return HfDirectory(path, config, SafetensorsSource(_shards(path)))


def read_bytes(file: Path) -> bytes:
    """The content of a small file. Raises CheckpointError naming the file."""
    shown = f"{label(file.parent)}/{file.name}"
    try:
        if file.stat().st_size > _MAX_SMALL:
            raise CheckpointError(f"{shown}: larger than 256 MiB; that isn't a {file.name}")
        return file.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{shown} is missing; give a complete model directory") from error
    except OSError as error:
        raise CheckpointError(f"{shown}: can't be read ({error.strerror})") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file."""
    shown = f"{label(file.parent)}/{file.name}"
    data = read_bytes(file)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{shown}: isn't valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{shown}: holds no JSON object")
    return content


def _shards(path: Path) -> list[Path]:
    if (path / _INDEX).exists():
        return _indexed(path)
    if (path / _SINGLE).exists():
        return [path / _SINGLE]
    found = sorted(path.glob("*.safetensors"))
    if found:
        return found
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise CheckpointError(
            f"{label(path)}: weights are pickles, which aren't loaded because a pickle can run "
            "code; save the model with safe_serialization=True"
        )
    raise CheckpointError(f"{label(path)}: no {_SINGLE} and no {_INDEX}")


def _indexed(path: Path) -> list[Path]:
    index = read_json(path / _INDEX)
    weights = index.get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{label(path)}/{_INDEX}: 'weight_map' names no tensor")
    files: dict[str, Path] = {}
    for tensor, name in weights.items():
        if not isinstance(name, str) or name != Path(name).name or name in ("", ".", ".."):
            raise CheckpointError(
                f"{label(path)}/{_INDEX}: the file of {tensor!r} is {name!r}; shards lie beside "
                "the index"
            )
        files.setdefault(name, path / name)
    for name, file in files.items():
        if not file.is_file():
            raise CheckpointError(f"{label(path)}: shard {name}, which {_INDEX} names, is missing")
    source = SafetensorsSource(files.values())
    present = set(source.names())
    for tensor, name in weights.items():
        if tensor not in present or source.file_of(tensor) != name:
            raise CheckpointError(
                f"{label(path)}/{_INDEX}: tensor {tensor!r} isn't in {name}, where the index has it"
            )
    return list(files.values())

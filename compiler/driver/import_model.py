"""`import_model`: whatever a user names as a model, as an imported program.

A directory, a .gguf file, a name on a hub, or a module. Our own architectures are built from the
config; others by transformers' class, if it is installed.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ropeway.compiler.artifact.manifest import SEAL
from ropeway.compiler.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from torch import nn

    from ropeway.compiler.frontend.imported import Imported


def import_model(
    model: "str | os.PathLike[str] | nn.Module",
    *,
    dtype: str = "bf16",
    max_model_len: int | None = None,
) -> "Imported":
    """Imports a model; its weights are named, not read.

    `model`: a Hugging Face directory, a .gguf file, a hub name ("org/name") or an nn.Module.
    `max_model_len` in tokens; None is what the model was made for. Raises CheckpointError for a
    damaged or unknown checkpoint, ImportModelError for a structure that isn't known.
    """
    if not isinstance(model, str | os.PathLike):
        return _import_instance(model, dtype, max_model_len)
    path = Path(model)
    if path.is_dir():
        if (path / SEAL).is_file():
            raise InputError(
                f"{path}: is compiled already: run it (`ropeway generate {path} ...`, or "
                "ropeway.LLM in Python), or give the model that it was made from"
            )
        return _import_directory(path, path.resolve().name, dtype, max_model_len)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"{path.name}: not a model; give a directory with config.json or a .gguf file"
            )
        return _import_gguf(path, dtype, max_model_len)
    return _import_hub(str(model), dtype, max_model_len)


def _import_instance(module: object, dtype: str, max_model_len: int | None) -> "Imported":
    from torch import nn  # noqa: PLC0415 -- the command's help must not load torch

    from ropeway.compiler.frontend.checkpoints.module_source import module_source  # noqa: PLC0415
    from ropeway.compiler.frontend.import_module import import_module  # noqa: PLC0415

    if isinstance(module, type) and issubclass(module, nn.Module):
        raise InputError(
            f"model: {module.__name__} is a class: pass an instance of it, with its weights"
        )
    if not isinstance(module, nn.Module):
        raise InputError(
            f"model: {type(module).__name__} is neither a path, a name nor a torch.nn.Module"
        )
    name = type(module).__name__
    source = module_source(module)
    return import_module(module, source, name=name, dtype=dtype, max_model_len=max_model_len)


def _import_directory(path: Path, name: str, dtype: str, max_model_len: int | None) -> "Imported":
    from ropeway.compiler.frontend.checkpoints.binding import bind  # noqa: PLC0415
    from ropeway.compiler.frontend.checkpoints.hf_directory import open_directory  # noqa: PLC0415
    from ropeway.compiler.frontend.checkpoints.hf_tokenizer import read_tokenizer  # noqa: PLC0415
    from ropeway.compiler.frontend.checkpoints.transformers_model import (  # noqa: PLC0415
        build_transformers_model,
    )
    from ropeway.compiler.frontend.import_module import import_module  # noqa: PLC0415
    from ropeway.models.registry import ARCHITECTURES, build_model  # noqa: PLC0415

    opened = open_directory(path)
    tied = opened.config.get("tie_word_embeddings") is True
    if opened.config.get("model_type") in ARCHITECTURES:
        module: nn.Module = build_model(opened.config)
        prefix = ""
    else:
        module = build_transformers_model(path, opened.config)
        prefix = str(getattr(module, "base_model_prefix", ""))
    source = bind(module, opened.tensors, prefix=prefix, tied=tied)
    return import_module(
        module,
        source,
        name=name,
        dtype=dtype,
        max_model_len=max_model_len,
        tokenizer=read_tokenizer(path, opened.config),
    )


def _import_gguf(path: Path, dtype: str, max_model_len: int | None) -> "Imported":
    from ropeway.compiler.frontend.checkpoints.binding import bind  # noqa: PLC0415
    from ropeway.compiler.frontend.checkpoints.gguf_file import open_gguf  # noqa: PLC0415
    from ropeway.compiler.frontend.checkpoints.gguf_tokenizer import (  # noqa: PLC0415
        read_gguf_tokenizer,
    )
    from ropeway.compiler.frontend.import_module import import_module  # noqa: PLC0415
    from ropeway.models.registry import build_model  # noqa: PLC0415

    opened = open_gguf(path)
    module = build_model(opened.config)
    tied = bool(opened.config["tie_word_embeddings"])
    return import_module(
        module,
        bind(module, opened.tensors, tied=tied),
        name=path.stem,
        dtype=dtype,
        max_model_len=max_model_len,
        tokenizer=read_gguf_tokenizer(path.name, opened.metadata),
    )


def _import_hub(name: str, dtype: str, max_model_len: int | None) -> "Imported":
    from ropeway.compiler.frontend.checkpoints.hub import download  # noqa: PLC0415

    path = download(name)
    return _import_directory(path, name.rpartition("/")[2], dtype, max_model_len)

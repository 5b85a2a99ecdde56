"""A model by its name on the Hugging Face hub, where a network exists."""

import re
from pathlib import Path

from ropeway.compiler.errors import CheckpointError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = ["*.safetensors", "*.json", "tokenizer.model", "vocab.txt", "merges.txt", "*.jinja"]


def download(name: str) -> Path:
    """The local snapshot of a hub model, fetched if it isn't cached.

    Raises CheckpointError for what isn't a hub name, and when the hub can't be reached.
    """
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{name}: no such file or directory (nor a hub name, which reads 'org/model')"
        )
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise CheckpointError(
            f"{name}: isn't a local path, and fetching it from the hub needs huggingface_hub: "
            "pip install 'ropeway[import]'"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, etag_timeout=10))
    except Exception as error:
        first = str(error).strip().splitlines()[0][:160] if str(error).strip() else ""
        raise CheckpointError(
            f"{name}: isn't a local path and can't be fetched from the hub "
            f"({type(error).__name__}: {first}); download it elsewhere and give the directory"
        ) from error

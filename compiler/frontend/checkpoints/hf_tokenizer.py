"""The tokenizer of a Hugging Face directory as assets of an artifact.

tokenizer.json is taken as it is; a directory that only has a sentencepiece model or vocabulary
files is converted by transformers. Settings come from tokenizer_config.json, generation_config.json
and config.json, in this order.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ropeway.compiler.errors import CheckpointError, MissingExtraError
from ropeway.compiler.frontend.checkpoints.hf_directory import label, read_bytes, read_json
from ropeway.runtime.text.assets import TokenizerAssets, TokenizerSettings

_SOURCES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_ROLES = ("bos", "eos", "pad", "unk")


def read_tokenizer(path: Path, config: Mapping[str, Any]) -> TokenizerAssets | None:
    """The directory's tokenizer, None if it has none. Raises CheckpointError for a damaged one."""
    file = path / "tokenizer.json"
    if file.exists():
        data = read_bytes(file)
    elif any((path / name).exists() for name in _SOURCES):
        data = _converted(path)
    else:
        return None
    return TokenizerAssets(tokenizer_json=data, settings=_settings(path, config, data))


def _converted(path: Path) -> bytes:
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise MissingExtraError(
            "converting a tokenizer without tokenizer.json", "transformers", "import"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        return str(tokenizer.backend_tokenizer.to_str()).encode()
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{label(path)}: there is no tokenizer.json and transformers can't convert the "
            f"tokenizer ({first}); add a tokenizer.json"
        ) from error


def _settings(path: Path, config: Mapping[str, Any], data: bytes) -> TokenizerSettings:
    ids = _vocabulary(path, data)
    own = _optional(path / "tokenizer_config.json")
    generation = _optional(path / "generation_config.json")
    specials = _optional(path / "special_tokens_map.json")
    texts: dict[str, str] = {}
    numbers: dict[str, int | None] = {}
    for role in _ROLES:
        text = _text(own.get(f"{role}_token", specials.get(f"{role}_token")))
        stated = _first_id(generation.get(f"{role}_token_id", config.get(f"{role}_token_id")))
        number = ids.get(text, stated) if text is not None else stated
        if text is None and number is not None:
            text = next((token for token, own_id in ids.items() if own_id == number), None)
        numbers[role] = number
        if text is not None:
            texts[f"{role}_token"] = text
    ends = _ids(generation.get("eos_token_id", config.get("eos_token_id")))
    if numbers["eos"] is not None and numbers["eos"] not in ends:
        ends = (numbers["eos"], *ends)
    return TokenizerSettings(
        bos_id=numbers["bos"],
        eos_id=numbers["eos"],
        pad_id=numbers["pad"],
        unk_id=numbers["unk"],
        eos_ids=ends,
        add_bos=bool(own.get("add_bos_token", False)) and numbers["bos"] is not None,
        chat_template=_template(path, own),
        special_tokens=texts,
    )


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _vocabulary(path: Path, data: bytes) -> dict[str, int]:
    """Token text -> id, checked by loading the tokenizer as the runtime will."""
    from tokenizers import Tokenizer  # noqa: PLC0415 -- not needed to import a bare module

    try:
        return dict(Tokenizer.from_buffer(data).get_vocab(with_added_tokens=True))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{label(path)}/tokenizer.json: can't be loaded ({error})") from error


def _text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> tuple[int, ...]:
    """The ids of a setting that holds one, several or none; some configs write none as -1."""
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def _first_id(value: Any) -> int | None:
    return next(iter(_ids(value)), None)


def _template(path: Path, own: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, else tokenizer_config.json's (the default of many)."""
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return read_bytes(file).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{label(path)}/{file.name}: isn't UTF-8 text; the file is damaged"
            ) from error
    if (path / "chat_template.json").exists():
        stored = read_json(path / "chat_template.json").get("chat_template")
        return stored if isinstance(stored, str) else None
    value = own.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{label(path)}: the chat template is {json.dumps(value)[:40]}")
    return value

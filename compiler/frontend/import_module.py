"""From an nn.Module and the source of its tensors to an imported program."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ropeway.compiler.errors import CheckpointError, ImportModelError, InputError
from ropeway.compiler.frontend.imported import Imported, TensorDict
from ropeway.compiler.frontend.importer.interpret import import_graph
from ropeway.compiler.frontend.importer.trace import trace
from ropeway.compiler.ir.types import DType
from ropeway.compiler.ops.tensors import TensorSource
from ropeway.runtime.text.assets import TokenizerAssets

DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "f32": torch.float32}
DTYPES |= {"float32": torch.float32}
_LENGTH_FIELDS = ("max_positions", "max_position_embeddings", "n_positions", "max_seq_len")
_EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_DEFAULT_LENGTH = 2048


def import_module(
    module: nn.Module,
    source: TensorSource,
    *,
    name: str,
    dtype: str | DType = "bf16",
    max_model_len: int | None = None,
    tokenizer: TokenizerAssets | None = None,
) -> Imported:
    """Imports a causal LM: ids int64[1, T] -> logits [1, T, V], attention by SDPA.

    `source` holds its parameters by their names in the module; none is read here. `max_model_len`
    None means what the module's config says; more than its config and rope scaling allow is refused
    with InputError. Raises ImportModelError for what isn't known.
    """
    if str(dtype) not in DTYPES:
        raise InputError(f"dtype: {dtype!r} isn't supported; use 'bfloat16' or 'float32'")
    length = _length(module, max_model_len)
    if length < 2:
        raise InputError(f"max_model_len: {length} tokens are too few; give at least 2")
    try:
        traced = trace(module, DTYPES[str(dtype)], length)
        ir, constants = import_graph(traced, _identifier(name), length, source)
    except ImportModelError as error:
        raise _explain_experts(module, error) from error
    logits = ir.fn.output("logits")
    if logits is None:
        raise ImportModelError(f"{name}: the model returns no logits")
    vocab_size = int(logits.type.shape[1])  # type: ignore[union-attr]
    _check_ends(name, tokenizer, vocab_size)
    return Imported(
        module=ir,
        source=source,
        constants=TensorDict(constants),
        tokenizer=tokenizer,
        name=name,
        architecture=type(module).__name__,
        vocab_size=vocab_size,
        max_model_len=length,
    )


def _check_ends(name: str, tokenizer: TokenizerAssets | None, vocab_size: int) -> None:
    """An end token that the model can't draw would make every answer run to its limit."""
    for token in tokenizer.settings.eos_ids if tokenizer else ():
        if token >= vocab_size:
            raise CheckpointError(
                f"{name}: end token {token} is outside the model's vocabulary of {vocab_size}; "
                "correct eos_token_id in config.json or generation_config.json"
            )


def _length(module: nn.Module, asked: int | None) -> int:
    """The length to compile for: what was asked for, if the model can, else the model's own."""
    config: Any = getattr(module, "config", None)
    own = next((n for n in (_count(config, field) for field in _LENGTH_FIELDS) if n), None)
    if asked is None:
        return own or _DEFAULT_LENGTH
    longest = math.inf if own is None else _reach(config, own)
    if asked > longest:
        raise InputError(
            f"max_model_len: {asked} tokens, but {type(module).__name__} was made for {own} by its "
            f"config{'' if longest == own else f' and reaches {longest:.0f} by its rope scaling'}; "
            f"give at most {longest:.0f}, or set rope scaling in the config"
        )
    return asked


def _reach(config: Any, own: int) -> float:
    """The longest sequence, in tokens, that a config's length and rope scaling allow.

    Dynamic scaling has no end. Yarn stretches the original length, which `own` may be or exceed.
    """
    rope: Any = getattr(config, "rope", None)
    if hasattr(rope, "original_length"):  # of models/
        kinds = [(rope.kind, rope.factor, rope.original_length)]
    else:
        kinds = [_read_rope(one) for one in _rope_settings(config)]
    longest = float(own)
    for kind, factor, original in kinds:
        if kind == "dynamic":
            return math.inf
        if kind == "linear":
            longest = max(longest, own * factor)
        if kind == "yarn":
            longest = max(longest, (original or own) * factor)
    return longest


def _rope_settings(config: Any) -> list[Mapping[str, Any]]:
    """transformers' rope settings: one object, or one for each type of layer."""
    found: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(found, Mapping):
        return []
    return [one for one in found.values() if isinstance(one, Mapping)] or [found]


def _read_rope(settings: Mapping[str, Any]) -> tuple[str, float, int]:
    kind = settings.get("rope_type", settings.get("type", "default"))
    original = settings.get("original_max_position_embeddings") or 0
    return str(kind), float(settings.get("factor") or 1.0), int(original)


def _explain_experts(module: nn.Module, error: ImportModelError) -> ImportModelError:
    """Of a mixture of experts say that it is one: the op that stopped it is only a symptom."""
    config: Any = getattr(module, "config", None)
    field = next((f for f in _EXPERT_FIELDS if (_count(config, f) or 0) > 1), None)
    if field is None:
        return error
    symptom = str(error).partition(";")[0]
    return ImportModelError(
        f"{type(module).__name__} is a mixture of experts ({field} {getattr(config, field)}), "
        f"which isn't supported yet; it stopped at {symptom}"
    )


def _count(config: Any, field: str) -> int | None:
    """A positive int of a config, None where it has none by that name."""
    value = getattr(config, field, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _identifier(name: str) -> str:
    """A name for IR text: letters, digits and underscores."""
    text = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
    return text if text and not text[0].isdigit() else f"model_{text}"

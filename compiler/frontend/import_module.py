"""From an nn.Module and the source of its tensors to an imported program."""

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
    None means what the module's config says. Raises ImportModelError.
    """
    if str(dtype) not in DTYPES:
        raise InputError(f"dtype: {dtype!r} isn't supported; use 'bfloat16' or 'float32'")
    length = max_model_len if max_model_len is not None else model_length(module)
    if length < 2:
        raise InputError(f"max_model_len: {length} tokens are too few; give at least 2")
    traced = trace(module, DTYPES[str(dtype)], length)
    ir, constants = import_graph(traced, _identifier(name), length, source)
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


def model_length(module: nn.Module) -> int:
    """The longest sequence that a module's config names, 2048 if it names none."""
    config: Any = getattr(module, "config", None)
    for field in _LENGTH_FIELDS:
        value = getattr(config, field, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return _DEFAULT_LENGTH


def _identifier(name: str) -> str:
    """A name for IR text: letters, digits and underscores."""
    text = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
    return text if text and not text[0].isdigit() else f"model_{text}"

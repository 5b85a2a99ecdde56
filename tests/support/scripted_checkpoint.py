"""A GPT-2 checkpoint that recites: after token p of any sequence comes script[p + 1].

Attention and MLP are zero and positions one-hot, so the head alone decides, by a wide margin. What
a test wants to see generated, it writes into the script; the prompt's length chooses where to
begin.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

WIDTH = 256  # positions, and one dimension for each


def make_scripted(
    folder: Path, script: Sequence[int], vocab: int, tokenizer_json: str, eos: int
) -> Path:
    """Write the checkpoint. `script` holds at most WIDTH ids below `vocab`; `eos` ends answers."""
    folder.mkdir(parents=True, exist_ok=True)
    config = transformers.GPT2Config(
        vocab_size=vocab,
        n_positions=WIDTH,
        n_embd=WIDTH,
        n_layer=1,
        n_head=8,
        n_inner=8,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos,
    )
    tensors = transformers.GPT2LMHeadModel(config).state_dict()
    for name, tensor in tensors.items():
        tensor.fill_(1.0 if name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight")) else 0.0)
    tensors["transformer.wpe.weight"] += torch.eye(WIDTH)
    for position, token in enumerate(script[1:]):
        tensors["lm_head.weight"][token, position] = 4.0
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "tokenizer.json").write_text(tokenizer_json)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder

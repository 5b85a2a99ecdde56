"""Greedy answers of every architecture and rope variant, token for token with transformers.

The whole path, in float32, on both targets: from a checkpoint through our own module, and from
transformers' instance as it is. Tiny random models; 16 prompts of mixed lengths, 64 new tokens.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.zoo import ORIGINAL, oracle_logits, oracle_logits_decoding, save_tiny, tiny_model

import ropeway

NEW_TOKENS = 64
LENGTH = 128
MODELS = [
    ("llama", "default"),
    ("mistral", "default"),
    ("qwen2", "default"),
    ("qwen3", "default"),
    ("llama", "linear"),
    ("qwen3", "dynamic"),
    ("qwen2", "yarn"),
    ("mistral", "llama3"),
]
UNLISTED = ["gemma3_text", "gpt2", "gpt_neox", "phi3", "cohere", "olmo2", "opt", "falcon"]


def _sizes(kind: str, rope: str) -> dict[str, Any]:
    if kind == "gpt2":
        return {"n_positions": LENGTH, "max_position_embeddings": LENGTH}
    # Dynamic rope starts to scale at max_position_embeddings: the answers cross it.
    return {} if rope == "dynamic" else {"max_position_embeddings": LENGTH}


def _prompts(rope: str, count: int) -> list[list[int]]:
    """Prompts of 1 to 46 tokens; up to the original length where rope depends on the length."""
    longest = ORIGINAL if rope == "dynamic" else 48
    generator = torch.Generator().manual_seed(5)
    lengths = [1 + 3 * number % longest for number in range(count)]
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


def _check(program: ropeway.Program, oracle: Any, rope: str, count: int = 16) -> None:
    """Every answer is transformers' own: at each place its likeliest token is the one we gave."""
    params = ropeway.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with ropeway.LLM(program, num_threads=1) as llm:
        outputs = llm.generate(_prompts(rope, count), params)
    read = oracle_logits_decoding if rope == "dynamic" else oracle_logits
    for output in outputs:
        prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        logits = read(oracle, torch.tensor(prompt + answer, dtype=torch.int32))
        assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize(("kind", "rope"), MODELS)
def test_our_definition_from_a_checkpoint(
    kind: str, rope: str, target: str, tmp_path: Path
) -> None:
    sizes = _sizes(kind, rope)
    folder = save_tiny(tmp_path / "model", kind, rope, **sizes)
    program = ropeway.compile(
        folder,
        target=target,
        dtype="float32",
        max_model_len=LENGTH,
        max_num_batched_tokens=64,
    )
    _check(program, tiny_model(kind, rope, **sizes), rope)


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize(("kind", "rope"), MODELS)
def test_their_instance_as_it_is(kind: str, rope: str, target: str) -> None:
    model = tiny_model(kind, rope, **_sizes(kind, rope))
    program = ropeway.compile(
        model, target=target, dtype="float32", max_model_len=LENGTH, max_num_batched_tokens=64
    )
    _check(program, model, rope)


@pytest.mark.parametrize("kind", UNLISTED)
def test_classes_that_nobody_listed(kind: str) -> None:
    model = tiny_model(kind, **_sizes(kind, "default"))
    program = ropeway.compile(
        model, target="cpu", dtype="float32", max_model_len=LENGTH, max_num_batched_tokens=64
    )
    _check(program, model, "default", count=4)

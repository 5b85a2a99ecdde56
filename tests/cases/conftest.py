"""One tiny random Llama of 260 byte tokens and 128 positions, its artifact, and its oracle."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from support.tiny_checkpoint import make_checkpoint

import ropeway


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cases") / "tiny")


@pytest.fixture(scope="session")
def artifact(checkpoint: Path) -> Path:
    """For cpu in float32; buckets decode-1, 2, 4 .. 64 and one of 64 mixed tokens."""
    program = ropeway.compile(checkpoint, dtype="float32", max_num_batched_tokens=64)
    return program.save(checkpoint.with_name("tiny.rope"))


@pytest.fixture(scope="session")
def greedy(checkpoint: Path) -> Callable[[Sequence[int], int], list[int]]:
    """greedy(prompt, count): transformers' own continuation in float32, end tokens as any other."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    known: dict[tuple[int, ...], list[int]] = {}

    def continue_ids(prompt: Sequence[int], count: int) -> list[int]:
        ids = known.setdefault(tuple(prompt), list(prompt))
        with torch.no_grad():
            while len(ids) < len(prompt) + count:
                logits = model(torch.tensor([ids]), use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
        return ids[len(prompt) : len(prompt) + count]

    return continue_ids

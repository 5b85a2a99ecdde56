"""transformers as the oracle: the real model, prompts and a passage."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def oracle(smollm2_gguf: Path) -> Any:
    """SmolLM2 in transformers, float32, read from the same GGUF by transformers' own reader."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """16 prompts of mixed lengths."""
    return json.loads((HERE / "prompts.json").read_text())


@pytest.fixture(scope="session")
def passage() -> str:
    """A fixed text of some 800 tokens."""
    return (HERE / "passage.txt").read_text()

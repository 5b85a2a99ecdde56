"""Toys behind the endpoints."""

from collections.abc import Callable
from typing import Any

import pytest
from support.char_tokenizer import END, char_tokenizer
from support.tiny_tokenizers import byte_level
from support.toy_device import ToyDevice
from support.toy_llm import toy_llm
from support.toy_server import ToyClient, ToyServer

MakeToy = Callable[..., ToyServer]


@pytest.fixture
def toy() -> MakeToy:
    """Makes a server over 97 printable characters; `steps` of the engine go into one news."""

    def make(*, steps: int = 1, fail_after: int | None = None, **settings: Any) -> ToyServer:
        llm = toy_llm(tokenizer=char_tokenizer(), eos_ids=(END,), max_model_len=64)
        return ToyServer(ToyClient(llm, steps=steps, fail_after=fail_after), **settings)

    return make


@pytest.fixture
def byte_toy() -> MakeToy:
    """Makes a server whose tokens are mostly parts of characters."""

    def make(*, steps: int = 1, **settings: Any) -> ToyServer:
        tokenizer = byte_level()
        device = ToyDevice(vocab=tokenizer.vocab_size)
        llm = toy_llm(tokenizer=tokenizer, eos_ids=(2,), max_model_len=64, device=device)
        return ToyServer(ToyClient(llm, steps=steps), **settings)

    return make

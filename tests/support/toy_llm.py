"""An LLM over the toy device, without artifact and tokenizer."""

from typing import Any

from ropeway.runtime.engine.core import EngineCore
from ropeway.runtime.engine.limits import step_limits
from ropeway.runtime.llm import LLM
from ropeway.runtime.loader import Engine
from ropeway.runtime.structured.compiler import GrammarCompiler
from support.lazy_queue import LazyQueue
from support.toy_device import ToyDevice

usual = {"overlap": False}


def toy_llm(
    *,
    blocks: int = 65,
    max_model_len: int = 64,
    tokenizer: Any = None,
    eos_ids: tuple[int, ...] = (),
    caching: bool = True,
    seed: int = 0,
    device: ToyDevice | None = None,
    overlap: bool | None = None,
    **limits: int | None,
) -> LLM:
    """`llm._engine.device` is the toy."""
    device = device or ToyDevice()
    overlap = usual["overlap"] if overlap is None else overlap
    core = EngineCore(
        device,
        step_limits(device.buckets, **limits),
        num_blocks=blocks,
        max_model_len=max_model_len,
        vocab_size=device.vocab,
        eos_ids=eos_ids,
        enable_prefix_caching=caching,
        seed=seed,
        queue=LazyQueue(device) if overlap else None,
        grammars=GrammarCompiler(tokenizer and (lambda: tokenizer), device.vocab, eos_ids),
    )
    return LLM.from_engine(Engine(None, device, core, tokenizer, 1))

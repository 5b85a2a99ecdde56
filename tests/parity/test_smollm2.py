"""The real model against transformers: token for token in float32, within bounds in bf16.

Greedy parity is checked by teacher forcing: transformers reads a prompt with our whole answer,
and at every place its likeliest next token must be the one we gave. By induction that is its own
greedy answer.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.device_logits import device_logits

import ropeway

NEW_TOKENS = 64
BF16_LOGIT_BOUND = 3e-2
PERPLEXITY_BOUND = 0.01


def _mismatches(oracle: Any, outputs: list[Any]) -> list[tuple[int, int]]:
    """(prompt, place) of every token that isn't transformers' own greedy choice."""
    wrong = []
    for number, output in enumerate(outputs):
        prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        assert len(answer) == NEW_TOKENS
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + answer])).logits[0]
        greedy = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        wrong += [
            (number, place)
            for place, (own, theirs) in enumerate(zip(answer, greedy, strict=True))
            if own != theirs
        ]
    return wrong


def _greedy() -> ropeway.SamplingParams:
    return ropeway.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.mark.slow
def test_float32_answers_are_transformers_own(
    smollm2_f32: Path, oracle: Any, prompts: list[str]
) -> None:
    with ropeway.LLM(smollm2_f32) as llm:
        outputs = llm.generate(prompts, _greedy())
    assert len({len(output.prompt_token_ids) for output in outputs}) > 8  # mixed lengths
    assert _mismatches(oracle, outputs) == []


@pytest.mark.slow
def test_the_reference_target_answers_the_same(
    smollm2_gguf: Path, oracle: Any, prompts: list[str]
) -> None:
    program = ropeway.compile(smollm2_gguf, target="reference", dtype="float32", max_model_len=256)
    with ropeway.LLM(program) as llm:
        outputs = llm.generate(prompts, _greedy())
    assert _mismatches(oracle, outputs) == []


@pytest.mark.slow
def test_bf16_logits_stay_near_float32(smollm2_bf16: Path, oracle: Any, passage: str) -> None:
    ids = _token_ids(smollm2_bf16, passage)[:160]
    with torch.inference_mode():
        reference = oracle(torch.tensor([ids])).logits[0].double().numpy()
    ours = device_logits(smollm2_bf16, ids)
    error = np.abs(ours - reference).max(-1) / np.abs(reference).max(-1)
    assert error.max() < BF16_LOGIT_BOUND


@pytest.mark.slow
def test_bf16_perplexity_is_that_of_transformers_in_bf16(
    smollm2_bf16: Path, oracle: Any, passage: str
) -> None:
    ids = _token_ids(smollm2_bf16, passage)
    params = ropeway.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with ropeway.LLM(smollm2_bf16) as llm:
        entries = llm.generate([ids], params)[0].prompt_logprobs[1:]
    own = [entry[token].logprob for entry, token in zip(entries, ids[1:], strict=True)]
    half = _bf16_copy(oracle)
    with torch.inference_mode():
        logits = half(torch.tensor([ids])).logits[0, :-1].double()
    theirs = torch.log_softmax(logits, -1)[range(len(ids) - 1), ids[1:]].tolist()
    ours, reference = (math.exp(-sum(x) / len(x)) for x in (own, theirs))
    assert ours == pytest.approx(reference, rel=PERPLEXITY_BOUND)
    assert reference < 50  # the text is text to this model


def _bf16_copy(oracle: Any) -> Any:
    import copy  # noqa: PLC0415

    return copy.deepcopy(oracle).to(torch.bfloat16)


def _token_ids(artifact: Path, text: str) -> list[int]:
    with ropeway.LLM(artifact) as llm:
        return list(llm.tokenizer.encode(text))

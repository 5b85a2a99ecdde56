"""The real model under constraints: its texts have their form, its neighbours keep their bits."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from ropeway.runtime.llm import LLM
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.runtime.sampling.structured import StructuredOutputs
from ropeway.runtime.text.assets import read_settings
from ropeway.runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}
REVIEW: dict[str, Any] = {
    "type": "object",
    "properties": {
        "sentiment": {"enum": ["positive", "neutral", "negative"]},
        "stars": {"anyOf": [{"type": "number", "minimum": 1, "maximum": 5}, {"type": "null"}]},
        "spam": {"type": "boolean"},
    },
    "required": ["sentiment", "stars", "spam"],
    "additionalProperties": False,
}
LABEL = {"type": "string", "pattern": "^[a-z]{1,8}$"}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "label": LABEL,
        "children": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
    },
    "required": ["label", "children"],
    "additionalProperties": False,
    "$defs": {
        "leaf": {
            "type": "object",
            "properties": {"label": LABEL},
            "required": ["label"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def llm(smollm2_bf16: Path) -> Iterator[LLM]:
    with LLM(smollm2_bf16, num_threads=1) as made:
        yield made


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("schema", [PERSON, REVIEW, TREE], ids=["person", "review", "tree"])
def test_json_validates(llm: LLM, schema: dict[str, Any]) -> None:
    asked = StructuredOutputs(json=schema)
    params = [
        SamplingParams(temperature=0, max_tokens=200, structured_outputs=asked),
        SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=200, structured_outputs=asked),
    ]
    ended = 0
    for one in params:
        [output] = llm.chat(chat("Tell me about Alice, who is 30 years old, as JSON."), one)
        for choice in output.outputs:
            if choice.finish_reason == "stop":
                jsonschema.validate(json.loads(choice.text), schema)
                ended += 1
    assert ended == 4


def test_neighbours_keep_their_bits(llm: LLM) -> None:
    free = [
        SamplingParams(temperature=0, max_tokens=24, logprobs=1),
        SamplingParams(temperature=0.9, seed=7, max_tokens=24, logprobs=1),
    ]
    bound = [
        SamplingParams(max_tokens=40, seed=1, structured_outputs=StructuredOutputs(json=PERSON)),
        SamplingParams(max_tokens=24, structured_outputs=StructuredOutputs(regex="[0-9 ]{20}")),
        SamplingParams(max_tokens=8, allowed_token_ids=llm.tokenizer.encode(" Paris London")),
    ]
    prompt = "The capital of France is"
    alone = [llm.generate(prompt, one)[0].outputs for one in free + bound[:1]]
    beside = llm.generate([prompt] * 5, [bound[1], free[0], bound[2], free[1], bound[0]])
    assert [beside[k].outputs for k in (1, 3, 4)] == alone


def test_llguidance_reads_the_vocabulary_as_we_do(llm: LLM) -> None:
    """Each token alone, as the only text of a grammar: what may be drawn spells it."""
    artifact = llm.artifact
    tokenizer = Tokenizer(
        artifact.read("tokenizer/tokenizer.json"),
        read_settings(artifact.read("tokenizer/settings.json")),
    )
    compiler = llm._engine.core._grammars
    words = np.zeros(-(-llm.vocab_size // 32), np.int32)
    for token in np.random.default_rng(0).integers(20, tokenizer.vocab_size, 60).tolist():
        piece = tokenizer.token_bytes(token)
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            continue
        matcher = compiler.compile(StructuredOutputs(choice=[text])).matcher()
        matcher.fill(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        drawn = tokenizer.token_bytes(int(bits.argmax()))
        assert bits.sum() >= 1 and drawn and piece.startswith(drawn)
        matcher.commit(token)
        assert matcher.finished and not matcher.error

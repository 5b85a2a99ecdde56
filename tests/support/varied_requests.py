"""Requests of many shapes, whose answers don't depend on when they come: greedy or seeded."""

import random
from dataclasses import dataclass
from typing import Any

from support.offline_answers import CHAT, TEXT

_DOCUMENTS = (
    "The quick brown fox jumps over the lazy dog. " * 4,
    "ภาษาไทย กับ 日本語 และ emoji 👩‍👩‍👧‍👦. " * 2,
    "def f(x):\n    return x + 1\n" * 6,
)
_LETTERS = list(range(64, 90))  # a to z, in the tokenizer of tiny_checkpoint
_FORMS: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"regex": "[a-f]{3,9}(-[0-9]{2}){1,3}"}},
    {"structured_outputs": {"choice": ["left", "right", "straight on"]}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "place",
                "schema": {
                    "type": "object",
                    "properties": {"x": {"type": "integer"}, "on": {"type": "boolean"}},
                    "required": ["x", "on"],
                    "additionalProperties": False,
                },
            },
        }
    },
)


@dataclass(frozen=True)
class Varied:
    """`choices`: of all its prompts together."""

    path: str
    body: dict[str, Any]
    choices: int


def varied_requests(count: int, seed: int) -> list[Varied]:
    """Prompts of up to 200 tokens or so, answers of up to 40, for a tokenizer of bytes."""
    draw = random.Random(seed)
    return [_one(draw, number) for number in range(count)]


def _one(draw: random.Random, number: int) -> Varied:
    body: dict[str, Any] = {"max_tokens": draw.randint(1, 40)}
    prompts = 1
    path = TEXT
    kind = draw.choice(("text", "ids", "list", "chat", "chat", "text"))
    document = draw.choice(_DOCUMENTS)
    text = document[: draw.randint(1, len(document))] + str(number)[: draw.randint(0, 4)]
    if kind == "chat":
        path = CHAT
        body["messages"] = [
            {"role": "system", "content": document[:40]},
            {"role": "user", "content": f"<|end|>{number}"},
        ]
    elif kind == "text":
        body["prompt"] = text
    elif kind == "ids":
        body["prompt"] = [draw.randrange(256) for _ in range(draw.randint(1, 200))]
    else:
        prompts = 2
        body["prompt"] = [text, "b" + text[:20]]
    _sampling(draw, body)
    _ends(draw, body)
    if draw.random() < 0.12:
        body.update(draw.choice(_FORMS))
        body["max_tokens"] = 60
        body.pop("allowed_token_ids", None)
    _shape(draw, body, path, kind)
    return Varied(path, body, prompts * body.get("n", 1))


def _sampling(draw: random.Random, body: dict[str, Any]) -> None:
    if draw.random() < 0.4:
        body["temperature"] = 0
    else:
        body["seed"] = draw.randrange(2**40)
        body["temperature"] = draw.choice((0.5, 1.0, 1.4))
        body.update(draw.choice(({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05})))
        if draw.random() < 0.4:
            body["n"] = draw.randint(2, 4)
    penalties: tuple[dict[str, Any], ...] = (
        {"frequency_penalty": 0.7},
        {"presence_penalty": -0.5},
        {"repetition_penalty": 1.2},
        {"logit_bias": {"101": 4, "32": -3}},
    )
    if draw.random() < 0.3:
        body.update(draw.choice(penalties))


def _ends(draw: random.Random, body: dict[str, Any]) -> None:
    if draw.random() < 0.4:
        body["allowed_token_ids"] = _LETTERS  # so that stop strings are often found
        body["stop"] = draw.choice(("e", ["ab", "xyz", "t"], ["qu", "m"]))
        body["include_stop_str_in_output"] = draw.random() < 0.3
    elif draw.random() < 0.3:
        body["stop_token_ids"] = [draw.randrange(256) for _ in range(8)]
    if draw.random() < 0.3:
        body["min_tokens"] = draw.randint(0, body["max_tokens"])
    if draw.random() < 0.3:
        body["ignore_eos"] = True


def _shape(draw: random.Random, body: dict[str, Any], path: str, kind: str) -> None:
    """What the answer looks like, and who goes first."""
    if draw.random() < 0.5:
        body["stream"] = True
        if draw.random() < 0.7:
            body["stream_options"] = {"include_usage": True}
    if draw.random() < 0.25:
        body["return_tokens_as_token_ids"] = True
        top = draw.choice((0, 2, 5))
        body.update({"logprobs": True, "top_logprobs": top} if path == CHAT else {"logprobs": top})
    elif kind in ("text", "ids") and draw.random() < 0.2:
        body["echo"] = True
    if draw.random() < 0.3:
        body["return_token_ids"] = True
    if draw.random() < 0.2:
        body["priority"] = draw.randint(-3, 3)
    if draw.random() < 0.1:
        body["cache_salt"] = draw.choice("ab")

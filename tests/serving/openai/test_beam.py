"""Beam search against a search of every continuation, done from the toy's logits alone."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.char_tokenizer import END, text_of
from support.toy_device import toy_logits
from support.toy_server import ToyServer

MakeToy = Callable[..., ToyServer]
VOCAB = 97
PROMPT = [40, 69, 76]


def _logprobs(tokens: list[int]) -> np.ndarray:
    logits = toy_logits(tokens, VOCAB).astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def _search(
    prompt: list[int], width: int, steps: int, penalty: float, ends: set[int]
) -> list[tuple[list[int], float]]:
    """(tokens, score) of the best beams, best first: the textbook's way, without stopping early."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[tuple[list[int], float]] = []
    for _ in range(steps):
        grown = []
        for tokens, total in live:
            row = _logprobs(prompt + tokens)
            for token in np.argsort(-row, kind="stable")[: 2 * width].tolist():
                grown.append(([*tokens, token], total + float(row[token])))
        done += [beam for beam in grown if beam[0][-1] in ends]
        rest = [beam for beam in grown if beam[0][-1] not in ends]
        live = sorted(rest, key=lambda beam: -beam[1])[:width]
    scored = []
    for tokens, total in [*done, *live]:
        length = len(prompt) + len(tokens) - (tokens[-1] in ends)
        scored.append((tokens, total / length**penalty))
    return sorted(scored, key=lambda beam: -beam[1])[:width]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0, -1.0])
@pytest.mark.parametrize(("width", "steps"), [(1, 6), (2, 5), (5, 8)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_beams_are_those_of_the_textbook(
    width: int, steps: int, penalty: float, seed: int, toy: MakeToy
) -> None:
    prompt = [*PROMPT, seed]
    expected = _search(prompt, width, steps, penalty, {END})
    answer = toy().whole(
        "/completions",
        prompt=prompt,
        n=width,
        max_tokens=steps,
        use_beam_search=True,
        length_penalty=penalty,
        return_token_ids=True,
        logprobs=0,
    )
    assert [c["token_ids"] for c in answer["choices"]] == [tokens for tokens, _ in expected]
    for choice, (tokens, score) in zip(answer["choices"], expected, strict=True):
        ended = tokens[-1] == END
        assert choice["text"] == text_of(tokens)
        assert choice["finish_reason"] == ("stop" if ended else "length")
        length = len(prompt) + len(tokens) - ended
        total = sum(choice["logprobs"]["token_logprobs"])
        assert total / length**penalty == pytest.approx(score, rel=1e-4)
    counted = sum(len(tokens) for tokens, _ in expected)
    assert answer["usage"]["completion_tokens"] == counted


def test_some_beam_ends_early(toy: MakeToy) -> None:
    """What the test above rests on."""
    found = [_search([*PROMPT, seed], 5, 8, 0.0, {END}) for seed in range(3)]
    assert any(beam[0][-1] == END for beams in found for beam in beams)


def test_ignore_eos_and_wider_beams(toy: MakeToy) -> None:
    expected = _search(PROMPT, 4, 6, 1.0, set())
    fields = {"prompt": PROMPT, "max_tokens": 6, "use_beam_search": True, "ignore_eos": True}
    answer = toy().whole("/completions", **fields, n=2, best_of=4, return_token_ids=True)
    assert [c["token_ids"] for c in answer["choices"]] == [t for t, _ in expected[:2]]


def test_beams_are_the_same_each_time_and_leave_nothing(toy: MakeToy) -> None:
    server = toy()
    fields = {"prompt": ["abc", "xyz"], "n": 3, "max_tokens": 6, "use_beam_search": True}
    first = server.whole("/completions", **fields)
    assert [c["index"] for c in first["choices"]] == list(range(6))
    assert server.whole("/completions", **fields)["choices"] == first["choices"]
    other = server.whole("/completions", **fields, seed=9, temperature=2, top_k=1)
    assert other["choices"] == first["choices"]
    stats = server.client.llm.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


def test_echo_and_more_logprobs_than_beams_look_at(toy: MakeToy) -> None:
    fields = {"prompt": PROMPT, "n": 1, "max_tokens": 3, "use_beam_search": True}
    answer = toy().whole("/completions", **fields, echo=True, logprobs=6, ignore_eos=True)
    [choice] = answer["choices"]
    [(tokens, _)] = _search(PROMPT, 1, 3, 1.0, set())
    assert choice["text"] == text_of([*PROMPT, *tokens])
    whole = [*PROMPT, *tokens]
    for k, value in enumerate(choice["logprobs"]["token_logprobs"]):
        if k == 0:
            assert value is None
            continue
        row = _logprobs(whole[:k])
        assert value == pytest.approx(row[whole[k]], abs=1e-4)
        best = np.sort(row)[::-1][:6]
        top = list(choice["logprobs"]["top_logprobs"][k].values())
        assert top[:6] == pytest.approx(best.tolist(), abs=1e-4)
        assert len(top) in {6, 7}


def test_chats_have_beams_too(toy: MakeToy) -> None:
    server = toy()
    messages = [{"role": "user", "content": "hi"}]
    fields: dict[str, Any] = {"messages": messages, "max_tokens": 4}
    ids = server.client.llm.tokenizer.encode_chat(messages)
    expected = _search(ids, 2, 4, 1.0, {END})
    answer = server.whole("/chat/completions", **fields, n=2, use_beam_search=True)
    texts = [c["message"]["content"] for c in answer["choices"]]
    assert texts == [text_of(tokens) for tokens, _ in expected]

"""Text from a compiled model that recites a known script, whole and streamed, one and many.

The oracles are the `tokenizers` library's own decoding and a search of the whole text.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support import tiny_tokenizers
from support.scripted_checkpoint import make_scripted
from support.tiny_tokenizers import library_decode

import ropeway

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
SEGMENTS = {
    "family": f"{FAMILY}ok{FAMILY}",
    "thai": "ภาษาไทยงาม",
    "accents": "e\u0301 é 中文 \U0001f642!",
    "dialogue": "the cat sat\n\nUser: the mat",
}
KINDS = {"bytes": tiny_tokenizers.byte_level, "sentencepiece": tiny_tokenizers.sentencepiece}
PADDING = 3  # the model has more logits than the tokenizer has ids


@dataclass(frozen=True)
class Recital:
    """A model that recites; `parts` are where its segments begin and end in the script."""

    llm: ropeway.LLM
    tokenizer: Any
    script: list[int]
    parts: dict[str, tuple[int, int]]

    def text(self, start: int, end: int) -> str:
        """What tokens start..end-1 add to the text before them."""
        before = library_decode(self.tokenizer, self.script[:start])
        return library_decode(self.tokenizer, self.script[:end])[len(before) :]

    def complete(self, start: int, end: int) -> int:
        """The last place up to `end` that isn't inside a character.

        The library marks the whole of a run of bytes whose end is broken; we keep its whole
        characters, so that is where to compare.
        """
        return next(at for at in range(end, start - 1, -1) if "\ufffd" not in self.text(start, at))

    def recite(self, start: int, **fields: Any) -> tuple[Any, list[list[Any]]]:
        """The first choice and the deltas of each; streamed and whole must agree in everything."""
        params = ropeway.SamplingParams(temperature=0, **{"max_tokens": 100, **fields})
        prompt = self.script[:start]
        [output] = self.llm.generate([prompt], params)
        deltas = list(self.llm.stream(prompt, params))
        choices = []
        for choice in output.outputs:
            mine = [delta for delta in deltas if delta.index == choice.index]
            assert "".join(delta.text for delta in mine) == choice.text
            assert [token for delta in mine for token in delta.token_ids] == choice.token_ids
            ends = [(d.finish_reason, d.stop_reason) for d in mine if d.finish_reason]
            assert ends == [(choice.finish_reason, choice.stop_reason)]
            assert (choice.text, choice.token_ids) == (
                output.outputs[0].text,
                output.outputs[0].token_ids,
            )
            choices.append(mine)
        return output.outputs[0], choices


@pytest.fixture(scope="module", params=KINDS)
def recital(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recital]:
    make: Callable[[], Any] = KINDS[request.param]
    tokenizer = make()
    end = 2  # both kinds' end token
    script, parts = tokenizer.encode("Hello"), {}
    for name, text in SEGMENTS.items():
        ids = tokenizer._inner.encode(text, add_special_tokens=False).ids
        parts[name] = len(script), len(script) + len(ids)
        script += [*ids, end]
    folder = make_scripted(
        tmp_path_factory.mktemp("recital") / "m",
        script,
        tokenizer.vocab_size + PADDING,
        tokenizer._inner.to_str(),
        end,
    )
    program = ropeway.compile(folder, dtype="float32", max_num_batched_tokens=64)
    with ropeway.LLM(program, num_threads=1) as llm:
        yield Recital(llm, tokenizer, script, parts)


@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize("n", [1, 3])
def test_characters_over_several_tokens_come_whole(recital: Recital, name: str, n: int) -> None:
    start, end = recital.parts[name]
    choice, streams = recital.recite(start, n=n)
    assert choice.token_ids == recital.script[start : end + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert choice.text == recital.text(start, end)
    assert choice.text.strip() == SEGMENTS[name]
    for deltas in streams:
        assert not any("\ufffd" in delta.text for delta in deltas)


@pytest.mark.parametrize("name", ["family", "thai"])
def test_a_limit_inside_a_character(recital: Recital, name: str) -> None:
    start, end = recital.parts[name]
    for count in range(1, min(12, end - start)):
        choice, _ = recital.recite(start, max_tokens=count)
        assert choice.finish_reason == "length"
        complete = recital.complete(start, start + count)
        assert choice.text.rstrip("\ufffd") == recital.text(start, complete)
        assert choice.text.endswith("\ufffd") == (complete < start + count)


def test_a_prompt_of_ids_that_ends_inside_a_character(recital: Recital) -> None:
    """The first delta holds the character that the output completed, and nothing of the prompt."""
    start, end = recital.parts["accents"]
    text = recital.text(start, end)
    cuts = [at for at in range(start + 1, end) if recital.text(start, at).endswith("\ufffd")]
    assert cuts
    for at in cuts:
        shown = recital.text(start, recital.complete(start, at))
        choice, [deltas] = recital.recite(at)
        assert choice.text == text[len(shown) :]
        first = next(delta.text for delta in deltas if delta.text)
        assert text[len(shown) :].startswith(first)


STOPS = {
    "over tokens": ["\n\nUser:"],
    "several lengths": ["zzz", "\n\nUser: the mat", "User", "\n\nUs"],
    "inside a token": ["h"],
    "from the middle of a token": ["e mat", "at\n\nU"],
    "one inside the other": ["sat\n", "at", "the cat sat"],
    "a near miss": ["\n\nUser: the dog"],
    "a half at the end": ["the matter"],
}


@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS)
@pytest.mark.parametrize("include", [False, True], ids=["cut", "included"])
@pytest.mark.parametrize("n", [1, 2])
def test_stop_strings(recital: Recital, stops: list[str], include: bool, n: int) -> None:
    start, end = recital.parts["dialogue"]
    full = recital.text(start, end)
    found = [
        (at, at - len(stop), stop)
        for stop in stops
        for at in range(len(stop), len(full) + 1)
        if full[at - len(stop) : at] == stop
    ]
    choice, streams = recital.recite(start, stop=stops, include_stop_str_in_output=include, n=n)
    if not found:
        assert (choice.text, choice.stop_reason) == (full, None)
    else:
        stop_end, stop_start, stop = min(found)
        assert choice.text == full[: stop_end if include else stop_start]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        used = next(k for k in range(start, end) if len(recital.text(start, k + 1)) >= stop_end)
        assert choice.token_ids == recital.script[start : used + 1]
    for deltas in streams:
        _check_held_back(recital, start, stops, deltas)


def _check_held_back(recital: Recital, start: int, stops: list[str], deltas: list[Any]) -> None:
    """After each token all is shown but the longest end that could begin a stop string."""
    shown = ""
    for count, delta in enumerate(deltas[:-1], 1):
        shown += delta.text
        so_far = recital.text(start, start + count)
        held = max(
            (k for stop in stops for k in range(1, len(stop)) if so_far.endswith(stop[:k])),
            default=0,
        )
        assert shown == so_far[: len(so_far) - held]


def test_a_stop_string_of_characters_over_tokens(recital: Recital) -> None:
    start, end = recital.parts["accents"]
    full = recital.text(start, end)
    for stop in ("\U0001f642", "文 \U0001f642!", "\u0301"):
        choice, _ = recital.recite(start, stop=stop)
        assert choice.text == full[: full.index(stop)]
        assert choice.stop_reason == stop


@pytest.mark.parametrize(("skip", "shown"), [(True, ""), (False, "<|im_end|>")])
def test_the_end_token_shows_only_where_asked_for(recital: Recital, skip: bool, shown: str) -> None:
    start, end = recital.parts["thai"]
    choice, _ = recital.recite(
        start, ignore_eos=True, max_tokens=end - start + 1, skip_special_tokens=skip
    )
    if recital.script[0] == 1:  # sentencepiece calls it </s>
        shown = shown and "</s>"
    assert choice.text == recital.text(start, end) + shown

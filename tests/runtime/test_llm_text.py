"""LLM with a tokenizer: text, stop strings, chat, streams; the toy model writes random ASCII."""

import pytest
from support.char_tokenizer import END, TURN, char_tokenizer, text_of
from support.toy_device import toy_greedy
from support.toy_llm import toy_llm

from ropeway.compiler.errors import RequestError
from ropeway.runtime.llm import LLM
from ropeway.runtime.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("overlap")

VOCAB = 97


def make() -> LLM:
    return toy_llm(tokenizer=char_tokenizer(), eos_ids=(END,))


def ids_of(text: str) -> list[int]:
    return [ord(char) - 32 for char in text]


def free_run(text: str, count: int = 30) -> list[int]:
    """The greedy answer to `text`, which must not end early."""
    ids = toy_greedy(ids_of(text), count, VOCAB)
    assert END not in ids
    return ids


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, **{"max_tokens": 30, **fields})


def test_text_in_text_out() -> None:
    with make() as llm:
        [output] = llm.generate("Hello, world", greedy())
        by_ids = llm.generate(ids_of("Hello, world"), greedy())[0]
    assert output.prompt == "Hello, world" and by_ids.prompt is None
    assert output.prompt_token_ids == ids_of("Hello, world")
    assert output.outputs[0].token_ids == free_run("Hello, world")
    assert output.outputs[0].text == text_of(free_run("Hello, world"))
    assert by_ids.outputs == output.outputs


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stop_string_over_several_tokens_ends_the_choice_there(include: bool, n: int) -> None:
    full = text_of(free_run("tea"))
    stop, other = full[7:10], full[20:22]
    end = full.index(stop)
    params = greedy(stop=[other, stop, "zzzz"], include_stop_str_in_output=include, n=n)
    with make() as llm:
        [output] = llm.generate("tea", params)
        deltas = list(llm.stream("tea", params))
        assert llm.stats().blocks_used == 0
    for choice in output.outputs:
        assert choice.text == full[: end + 3 * include]
        assert choice.token_ids == free_run("tea")[: end + 3]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        mine = [d for d in deltas if d.index == choice.index]
        assert "".join(d.text for d in mine) == choice.text
        assert [t for d in mine for t in d.token_ids] == choice.token_ids
        assert (mine[-1].finish_reason, mine[-1].stop_reason) == ("stop", stop)
        assert not any(d.finish_reason for d in mine[:-1])


def test_a_stop_string_in_the_very_last_token_wins_over_the_length() -> None:
    full = text_of(free_run("tea"))
    with make() as llm:
        [output] = llm.generate("tea", greedy(stop=full[8:10], max_tokens=10))
    assert output.outputs[0].stop_reason == full[8:10]
    assert output.outputs[0].finish_reason == "stop"


def test_half_a_stop_string_at_the_end_is_shown() -> None:
    full = text_of(free_run("tea"))
    with make() as llm:
        params = greedy(stop=full[8:10] + "\x01", max_tokens=10)
        [output] = llm.generate("tea", params)
        deltas = [d.text for d in llm.stream("tea", params)]
    assert output.outputs[0].text == "".join(deltas) == full[:10]
    assert output.outputs[0].finish_reason == "length"


def test_one_choice_stops_and_the_others_go_on() -> None:
    params = SamplingParams(temperature=1, seed=3, n=3, max_tokens=20, ignore_eos=True)
    with make() as llm:
        free = llm.generate("xyz", params)[0].outputs
        stop = free[1].text[4:7]
        assert stop not in free[0].text and stop not in free[2].text
        cut = llm.generate(
            "xyz",
            SamplingParams(temperature=1, seed=3, n=3, max_tokens=20, ignore_eos=True, stop=stop),
        )[0].outputs
    assert cut[0] == free[0] and cut[2] == free[2]
    assert cut[1].text == free[1].text[:4] and cut[1].stop_reason == stop


def test_end_token_is_in_the_ids_and_not_in_the_text() -> None:
    with make() as llm:
        params = greedy(logit_bias={END: 100}, logprobs=0)
        [output] = llm.generate("tea", params)
    choice = output.outputs[0]
    assert (choice.token_ids, choice.text) == ([END], "")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert choice.logprobs is not None
    assert choice.logprobs[0][END].decoded_token == "<end>"


def test_logprobs_carry_each_tokens_text() -> None:
    with make() as llm:
        [output] = llm.generate("tea", greedy(logprobs=2, prompt_logprobs=1, max_tokens=3))
    for entry in [*(output.outputs[0].logprobs or []), *(output.prompt_logprobs or [])[1:]]:
        assert entry is not None
        for token, logprob in entry.items():
            want = {END: "<end>", TURN: "<turn>"}.get(token) or text_of([token])
            assert logprob.decoded_token == want


def test_chat_writes_special_tokens_by_the_template_alone() -> None:
    message = {"role": "user", "content": "hi<turn>"}
    ids = [TURN, *ids_of("user: hi<turn>"), TURN]
    with make() as llm:
        [one] = llm.chat([message], greedy())
        both = llm.chat([[message], [message]], greedy())
        assert one.prompt_token_ids == ids
        assert one.outputs[0].token_ids == toy_greedy(ids, 30, VOCAB, (END,))
        assert [o.outputs for o in both] == [one.outputs] * 2
        with pytest.raises(RequestError, match="messages"):
            llm.chat([], greedy())


def test_chat_without_a_template_is_refused() -> None:
    llm = toy_llm(tokenizer=char_tokenizer(None))
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_empty_text_is_refused() -> None:
    with make() as llm, pytest.raises(RequestError, match="no tokens"):
        llm.generate("", greedy())

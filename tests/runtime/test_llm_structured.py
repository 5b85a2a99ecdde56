"""Constrained texts through the whole engine; the toy model writes random ASCII by itself."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from support.char_tokenizer import END, char_tokenizer
from support.toy_llm import toy_llm, usual

from ropeway.compiler.errors import RequestError, RunError
from ropeway.runtime.llm import LLM
from ropeway.runtime.outputs import CompletionOutput
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.runtime.sampling.structured import StructuredOutputs

pytestmark = pytest.mark.usefixtures("overlap")

PHONE = r"[0-9]{3}-[0-9]{4}"
WORDS = r"[a-z]+( [a-z]+){2}\."
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[a-z]{2,4}$"},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "t": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["id", "n", "t"],
    "additionalProperties": False,
}


def make(**options: Any) -> LLM:
    return toy_llm(tokenizer=char_tokenizer(), eos_ids=(END,), **{"max_model_len": 128, **options})


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make() as made:
        yield made


def ask(structured: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    asked = None if structured is None else StructuredOutputs(**structured)
    return SamplingParams(structured_outputs=asked, **{"max_tokens": 60, **fields})


def one(llm: LLM, params: SamplingParams, prompt: str = "tea") -> CompletionOutput:
    return llm.generate(prompt, params)[0].outputs[0]


KINDS: list[SamplingParams] = [
    ask({"regex": PHONE}, temperature=0),
    ask({"regex": WORDS}, seed=4),
    ask({"json": RECORD, "disable_any_whitespace": True}, seed=5),
    ask({"choice": ["alpha", "beta", "alphabet"]}, seed=6, n=3),
    ask({"grammar": 'root ::= "x" | "(" root ")"'}, seed=7, temperature=0.8),
    ask({"regex": "[ab]{20,30}"}, seed=8, presence_penalty=0.5, min_p=0.01),
    ask({"regex": "[0-9]+"}, seed=9, n=2, allowed_token_ids=[17, 19, END]),
    ask(None, seed=10, allowed_token_ids=[33, 34, 35], max_tokens=12),
]
FREE = [
    ask(None, temperature=0, max_tokens=40, logprobs=2),
    ask(None, seed=1, max_tokens=40, repetition_penalty=1.2, logprobs=1),
    ask(None, seed=2, n=3, max_tokens=30, top_p=0.9),
    ask(None, temperature=0, max_tokens=3, prompt_logprobs=1),
]


def check(params: SamplingParams, output: CompletionOutput) -> None:
    """By Python's own `re`, jsonschema, or by hand."""
    asked = params.structured_outputs
    if params.allowed_token_ids:
        assert set(output.token_ids) <= set(params.allowed_token_ids)
    if asked is None:
        return
    if output.finish_reason == "length":
        assert len(output.token_ids) == params.max_tokens
        return
    assert output.finish_reason == "stop" and output.stop_reason is None
    if asked.regex:
        assert re.fullmatch(asked.regex, output.text)
    elif asked.json:
        jsonschema.validate(json.loads(output.text), RECORD)
    elif asked.choice:
        assert output.text in asked.choice
    else:
        assert re.fullmatch(r"(\(*)x(\)*)", output.text)
        assert output.text.count("(") == output.text.count(")")


@pytest.mark.parametrize("params", KINDS, ids=range(len(KINDS)))
def test_each_kind_has_its_form(llm: LLM, params: SamplingParams) -> None:
    ended = 0
    for prompt in ("tea", "a long prompt about nothing at all", "x"):
        [output] = llm.generate(prompt, params)
        assert len(output.outputs) == params.n
        for choice in output.outputs:
            check(params, choice)
            ended += choice.finish_reason == "stop"
    assert ended or params.structured_outputs is None
    assert llm.stats().blocks_used == 0


def everything(llm: LLM, params: list[SamplingParams]) -> list[Any]:
    prompts = [f"prompt {'abc' * (n % 5)} {n % 3}" for n in range(len(params))]
    outputs = [o for o in llm.generate(prompts, params)]
    llm._engine.core.scheduler.check()
    return [(o.outputs, o.prompt_logprobs) for o in outputs]


def test_alone_in_company_and_beside_free_ones_the_same_tokens() -> None:
    params = [p for pair in zip(KINDS, FREE * 2, strict=True) for p in pair]
    with make() as llm:
        together = everything(llm, params)
    for index, expected in enumerate(together):
        with make() as llm:
            prompt = f"prompt {'abc' * (index % 5)} {index % 3}"
            [output] = llm.generate(prompt, params[index])
        assert (output.outputs, output.prompt_logprobs) == expected
        for choice in output.outputs:
            check(params[index], choice)


def test_free_neighbours_never_notice() -> None:
    with make() as llm:
        without = everything(llm, FREE * 2)
    with make() as llm:
        prompts = [f"prompt {'abc' * (n % 5)} {n % 3}" for n in range(8)]
        mixed = llm.generate([*prompts, *prompts], [*FREE, *FREE, *KINDS])
    assert [(o.outputs, o.prompt_logprobs) for o in mixed[:8]] == without


def test_one_step_or_two_in_flight_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for overlap in (False, True):
        monkeypatch.setitem(usual, "overlap", overlap)
        with make() as llm:
            found.append(everything(llm, KINDS + FREE))
    assert found[0] == found[1]


def test_a_pool_so_small_that_all_are_preempted() -> None:
    params = [ask({"regex": "([a-z]{5}[0-9])+"}, seed=n, max_tokens=50) for n in range(5)]
    params.append(ask({"regex": "[ab]{40}"}, seed=9, n=3, max_tokens=50))
    with make() as llm:
        roomy = everything(llm, params)
    with make(blocks=30) as llm:
        tight = everything(llm, params)
        assert llm.stats().preemptions >= len(params)
        assert llm.stats().blocks_used == 0
    assert tight == roomy
    for asked, (choices, _) in zip(params, tight, strict=True):
        for choice in choices:
            check(asked, choice)


def test_seeds_are_reproducible_and_choices_differ(llm: LLM) -> None:
    params = ask({"regex": "[a-z]{30}"}, seed=12, n=3)
    first, again = llm.generate(["tea", "tea"], params)
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in again.outputs]
    assert len({c.text for c in first.outputs}) == 3
    other = llm.generate("tea", ask({"regex": "[a-z]{30}"}, seed=13))[0]
    assert other.outputs[0].text not in {c.text for c in first.outputs}


def test_a_complete_text_ends_without_an_end_token(llm: LLM) -> None:
    output = one(llm, ask({"regex": PHONE}))
    assert len(output.token_ids) == 8 and END not in output.token_ids
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 30}])
def test_a_complete_text_ends_whatever_else_is_asked(llm: LLM, fields: dict[str, Any]) -> None:
    output = one(llm, ask({"regex": PHONE}, **fields))
    assert output.finish_reason == "stop" and re.fullmatch(PHONE, output.text)


def test_min_tokens_holds_while_the_text_may_go_on(llm: LLM) -> None:
    for seed in range(5):
        output = one(llm, ask({"regex": "[ab]*"}, min_tokens=25, seed=seed, logit_bias={END: 9}))
        assert len(output.token_ids) >= 25


def test_ignore_eos_ends_with_the_end_token_all_the_same(llm: LLM) -> None:
    output = one(llm, ask({"regex": "[ab]*"}, ignore_eos=True, logit_bias={END: 100}, seed=1))
    assert output.finish_reason == "stop" and output.token_ids == [END]


def test_length_cuts_a_text_short(llm: LLM) -> None:
    output = one(llm, ask({"regex": "[a-z]{50}"}, max_tokens=9))
    assert output.finish_reason == "length" and re.fullmatch("[a-z]{9}", output.text)


def test_a_text_that_the_last_token_completes_is_complete(llm: LLM) -> None:
    output = one(llm, ask({"regex": PHONE}, max_tokens=8))
    assert re.fullmatch(PHONE, output.text) and len(output.token_ids) == 8
    assert output.finish_reason == "stop"


def test_stop_strings_still_stop(llm: LLM) -> None:
    output = one(llm, ask({"regex": "[ab]{5}-[ab]{20}"}, stop="-", seed=3))
    assert output.stop_reason == "-" and re.fullmatch("[ab]{5}", output.text)


def test_streams_say_the_same(llm: LLM) -> None:
    for params in KINDS:
        whole = llm.generate("tea", params)[0].outputs
        deltas = list(llm.stream("tea", params))
        for choice in whole:
            mine = [d for d in deltas if d.index == choice.index]
            assert "".join(d.text for d in mine) == choice.text
            assert [t for d in mine for t in d.token_ids] == choice.token_ids
            ends = [d.finish_reason for d in mine if d.finish_reason]
            assert ends == [choice.finish_reason] and mine[-1].finish_reason


def test_aborts_in_the_middle(llm: LLM) -> None:
    stream = llm.stream("tea", ask({"regex": "[a-z]{50}"}, n=2, max_tokens=60))
    for _ in range(5):
        next(stream)
    stream.close()
    assert llm.stats().blocks_used == 0
    check(KINDS[0], one(llm, KINDS[0]))


REFUSED: list[dict[str, Any]] = [
    {"regex": "("},
    {"json": {"type": "text"}},
    {"json": "{"},
    {"grammar": "start: nothing"},
    {"choice": ["日本"]},  # no token of this model spells it
    {"structural_tag": "{}"},
    {"regex": ""},
]


@pytest.mark.parametrize("structured", REFUSED)
def test_what_cannot_be_compiled_is_refused_and_the_engine_lives(
    llm: LLM, structured: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        llm.generate("tea", ask(structured))
    with pytest.raises(RequestError, match="request 1: structured_outputs"):
        llm.generate(["tea", "tea"], [FREE[0], ask(structured)])
    assert llm.stats().running == llm.stats().waiting == 0
    check(KINDS[0], one(llm, KINDS[0]))


def test_ids_outside_the_vocabulary_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="allowed_token_ids"):
        llm.generate("tea", ask(None, allowed_token_ids=[97]))


def test_a_constraint_that_leaves_nothing_ends_its_request_only(llm: LLM) -> None:
    empty = ask({"regex": "[0-9]+"}, allowed_token_ids=[40])
    with llm.stream("tea", ask({"regex": "[a-z]{20}"}, seed=1)) as neighbour:
        first = next(neighbour)
        with pytest.raises(RunError, match="no token is left to draw"):
            llm.generate("tea", empty)
        rest = "".join(delta.text for delta in neighbour)
    assert re.fullmatch("[a-z]{20}", first.text + rest)
    assert llm.stats().blocks_used == 0


def test_a_grammar_that_grows_over_its_limit_ends_its_request_only(llm: LLM) -> None:
    names = [f"r{n}" for n in range(2500)]  # which may all begin at once, after seven tokens
    rules = "\n".join(f'{name}: "x" "{name}"' for name in names)
    grows = f"start: /[qr]{{7}}/ ({' | '.join(names)})\n{rules}"
    params = [ask({"regex": "[a-z]{20}"}, seed=1), ask({"grammar": grows}, seed=1)]
    with llm.stream("tea", params[0]) as neighbour:
        with pytest.raises(RunError, match="Current row has"):
            llm.generate("tea", params[1])
        text = "".join(delta.text for delta in neighbour)
    assert re.fullmatch("[a-z]{20}", text)
    assert llm.stats().blocks_used == 0
    check(KINDS[0], one(llm, KINDS[0]))


def test_without_a_tokenizer_nothing_can_be_constrained() -> None:
    with toy_llm() as llm:
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.generate([5, 6], ask({"regex": "a"}, detokenize=False))
        [output] = llm.generate([5, 6], ask(None, allowed_token_ids=[8], max_tokens=3))
    assert output.outputs[0].token_ids == [8, 8, 8]


def test_the_core_takes_no_constraint_without_its_grammar(llm: LLM) -> None:
    from ropeway.runtime.engine.messages import GenerationRequest  # noqa: PLC0415

    core = llm._engine.core
    request = GenerationRequest(request_id="r", prompt=(1, 2), params=KINDS[0])
    with pytest.raises(RequestError, match="compiled first"):
        core.add(request)
    core.add(request, core.compile_grammar(request.params))
    updates = []
    while core.has_work:
        updates += core.step()
    assert [u.token is None for u in updates] == [False] * 8 + [True]
    assert [u.finish_reason for u in updates] == [None] * 8 + ["stop"]

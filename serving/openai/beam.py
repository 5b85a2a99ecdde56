"""Beam search over requests of one token each; the prefix cache keeps them cheap.

The algorithm and its scores are those that vLLM users know: `width` beams run side by side; each
step the 2 * width most likely tokens of every beam are looked at, an end token among them completes
a beam, and the best `width` of the others go on. A beam's score is its logprob over its length,
prompt included and end token not, raised to length_penalty. Ties go to the beam that was ahead,
then to the likelier token, so the same request has the same beams.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from ropeway.runtime.outputs import CompletionOutput, Logprobs, RequestOutput
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.runtime.text.tokenizer import Tokenizer
from ropeway.serving.errors import ApiError
from ropeway.serving.openai.fields import GenerationFields
from ropeway.serving.openai.generating import outputs_of
from ropeway.serving.openai.logprobs import top_entries

if TYPE_CHECKING:
    from ropeway.serving.process.client import EngineClient
    from ropeway.serving.process.generation import Submission

MAX_WIDTH = 32

_NOT_WITH_BEAMS = (
    "allowed_token_ids",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "response_format",
    "stop",
    "stop_token_ids",
    "structured_outputs",
)
_HARMLESS: dict[str, object] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}


@dataclass(frozen=True, slots=True)
class Beam:
    """`ids` were generated; `ended`: the last of them is an end token. An entry a token."""

    ids: tuple[int, ...] = ()
    logprob: float = 0.0
    entries: tuple[Logprobs, ...] = ()
    ended: bool = False


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """What is searched for: the best `n` of `width` beams of at most `max_tokens` tokens."""

    n: int
    width: int
    max_tokens: int
    length_penalty: float
    ends: frozenset[int]

    def score(self, beam: Beam, prompt_tokens: int) -> float:
        """Higher is better."""
        length = prompt_tokens + len(beam.ids) - beam.ended
        return float(beam.logprob / length**self.length_penalty)

    def grown(self, beams: Sequence[Beam], looked: Sequence[Logprobs]) -> list[Beam]:
        """Every beam with each of the tokens that were looked at, the best first."""
        made = [
            Beam((*beam.ids, token), beam.logprob + value.logprob, (*beam.entries, entry))
            for beam, entry in zip(beams, looked, strict=True)
            for token, value in top_entries(entry, 2 * self.width)
        ]
        made = [replace(one, ended=one.ids[-1] in self.ends) for one in made]
        return sorted(made, key=lambda one: -one.logprob)  # stable; all have the same length

    def settled(self, ended: Sequence[Beam], live: Sequence[Beam], prompt_tokens: int) -> bool:
        """Whether no live beam can still get among the n best: logprobs only fall, and the best
        that length can do for one is to be the greatest."""
        if len(ended) < self.n or self.length_penalty < 0:
            return False
        worst = self.best(ended, prompt_tokens)[-1]
        longest = prompt_tokens + self.max_tokens
        hope = max((beam.logprob / longest**self.length_penalty for beam in live), default=None)
        return hope is None or hope < self.score(worst, prompt_tokens)

    def best(self, beams: Sequence[Beam], prompt_tokens: int) -> list[Beam]:
        """The n best."""
        return sorted(beams, key=lambda beam: -self.score(beam, prompt_tokens))[: self.n]


def check_beams(request: GenerationFields) -> None:
    """Raises ApiError 400 for what beams can't do. What only concerns drawing (temperature, top_p,
    top_k, min_p, seed) has no effect on them."""
    for name in _NOT_WITH_BEAMS:
        value = getattr(request, name)
        if value and value != _HARMLESS.get(name):
            raise ApiError(400, f"{name}: not with use_beam_search", param=name)
    width = request.best_of or request.n or 1
    if width > MAX_WIDTH:
        field = "best_of" if request.best_of else "n"
        raise ApiError(400, f"{field}: at most {MAX_WIDTH} beams", param=field)


async def beam_search(
    request: GenerationFields,
    submission: "Submission",
    client: "EngineClient",
    tokenizer: Tokenizer | None,
) -> RequestOutput:
    """The best beams of `submission`, as a request's choices in their order."""
    n = request.n or 1
    ends = () if request.ignore_eos else client.info.eos_ids
    search = BeamSearch(
        n=n,
        width=request.best_of or n,
        max_tokens=submission.params.max_tokens or 1,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        ends=frozenset(ends),
    )
    prompt = tuple(submission.prompt_ids)
    step = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=min(
            max(2 * search.width, submission.params.logprobs or 0), client.info.vocab_size
        ),
        detokenize=False,
    )
    scored = msgspec.structs.replace(step, prompt_logprobs=submission.params.prompt_logprobs)
    first: RequestOutput | None = None
    live, ended = [Beam()], list[Beam]()
    for _ in range(search.max_tokens):
        outputs = await outputs_of(
            await client.submit(
                [
                    replace(
                        submission,
                        prompt_ids=(*prompt, *beam.ids),
                        params=step if first else scored,
                        prompt_text=None,
                    )
                    for beam in live
                ],
                streaming=False,
            )
        )
        first = first or outputs[0]
        looked = [(output.outputs[0].logprobs or [{}])[0] for output in outputs]
        grown = search.grown(live, looked)
        ended += [beam for beam in grown if beam.ended]
        live = [beam for beam in grown if not beam.ended][: search.width]
        if not live or search.settled(ended, live, len(prompt)):
            break
    assert first is not None
    chosen = search.best([*ended, *live], len(prompt))
    return msgspec.structs.replace(
        first,
        prompt_token_ids=list(prompt),
        outputs=[
            _output(index, beam, request, prompt, tokenizer) for index, beam in enumerate(chosen)
        ],
    )


def _output(
    index: int,
    beam: Beam,
    request: GenerationFields,
    prompt: Sequence[int],
    tokenizer: Tokenizer | None,
) -> CompletionOutput:
    shown = beam.ids[:-1] if beam.ended and not request.include_stop_str_in_output else beam.ids
    text = ""
    if tokenizer is not None:
        detokenizer = tokenizer.detokenizer(prompt, request.skip_special_tokens is not False)
        text = "".join([*map(detokenizer.push, shown), detokenizer.finish()])
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=list(beam.ids),
        cumulative_logprob=beam.logprob,
        logprobs=list(beam.entries),
        finish_reason="stop" if beam.ended else "length",
        stop_reason=None,
    )

"""What /v1/completions answers: a request's settings, resolved, and the whole answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ropeway.runtime.outputs import CompletionOutput, Logprobs, RequestOutput
from ropeway.runtime.text.tokenizer import Tokenizer
from ropeway.serving.openai.best_of import best
from ropeway.serving.openai.fields import CompletionRequest
from ropeway.serving.openai.logprobs import (
    PromptLogprobs,
    TextLogprobs,
    TextLogprobsWriter,
    prompt_logprobs,
)
from ropeway.serving.openai.prompts import Prompt
from ropeway.serving.openai.usage import Usage, usage_of


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One answer to one prompt. The fields after `stop_reason` come where they were asked for."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """A request on its way: its fields with the defaults put in, and its encoded prompts.

    `n` choices are answered for each prompt, in the order of the prompts. With `scores_only`
    nothing is generated (max_tokens 0): the one token that the engine draws is dropped.
    """

    request: CompletionRequest
    prompts: Sequence[Prompt]
    answer_id: str
    created: int
    model: str
    tokenizer: Tokenizer | None
    n: int
    scores_only: bool

    @property
    def skip_special_tokens(self) -> bool:
        """Whether special tokens are left out of texts."""
        return self.request.skip_special_tokens is not False

    @property
    def heavy(self) -> bool:
        """Whether an answer takes long enough to make that others would wait for it."""
        return self.request.logprobs is not None or self.request.prompt_logprobs is not None

    def prompt_text(self, position: int) -> str:
        """What echo puts before an answer to a prompt; "" without echo."""
        if not self.request.echo:
            return ""
        return self.prompts[position].shown(self.tokenizer, self.skip_special_tokens)

    def writer(self, position: int, entries: Sequence[Logprobs | None] | None) -> "ChoiceLogprobs":
        """Makes the logprobs of a choice; `entries` are its prompt's, for echo."""
        return ChoiceLogprobs(self, position, entries)


class ChoiceLogprobs:
    """The logprobs of one choice, echoed prompt first."""

    def __init__(
        self, job: CompletionJob, position: int, entries: Sequence[Logprobs | None] | None
    ) -> None:
        ids, count = job.prompts[position].ids, job.request.logprobs or 0
        as_ids = bool(job.request.return_tokens_as_token_ids)
        echo = bool(job.request.echo)
        self._writer = TextLogprobsWriter(
            job.tokenizer,
            () if echo else ids,
            count,
            skip_special_tokens=job.skip_special_tokens,
            as_token_ids=as_ids,
        )
        self.prompt: TextLogprobs | None = None
        if echo:
            self.prompt = self._writer.take(ids, entries or [None] * len(ids))
            # Where the tokens spell the prompt in another way, the answer still begins at its end.
            self._writer.skip_to(len(job.prompt_text(position)))

    def take(self, ids: Sequence[int], entries: Sequence[Logprobs] | None) -> TextLogprobs:
        """The entries of the answer's next tokens."""
        return self._writer.take(ids, entries or [])


def whole_answer(job: CompletionJob, outputs: Sequence[RequestOutput]) -> Completion:
    """The answer to all prompts; each output holds every choice that was drawn for one."""
    choices: list[CompletionChoice] = []
    for position, output in enumerate(outputs):
        for chosen in best(output.outputs, job.n):
            choices.append(_choice(job, position, output, chosen, len(choices)))
    drawn = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return Completion(
        id=job.answer_id,
        created=job.created,
        model=job.model,
        choices=choices,
        usage=usage_of(
            sum(len(prompt.ids) for prompt in job.prompts),
            0 if job.scores_only else drawn,
            sum(output.num_cached_tokens for output in outputs),
        ),
    )


def _choice(
    job: CompletionJob,
    position: int,
    output: RequestOutput,
    chosen: CompletionOutput,
    index: int,
) -> CompletionChoice:
    request = job.request
    ids = [] if job.scores_only else chosen.token_ids
    choice = CompletionChoice(
        index=index,
        text=job.prompt_text(position) + ("" if job.scores_only else chosen.text),
        finish_reason="length" if job.scores_only else chosen.finish_reason,
        stop_reason=None if job.scores_only else chosen.stop_reason,
    )
    if request.logprobs is not None:
        writer = job.writer(position, output.prompt_logprobs)
        own = writer.take(ids, None if job.scores_only else chosen.logprobs)
        choice.logprobs = own if writer.prompt is None else _joined(writer.prompt, own)
    if request.prompt_logprobs is not None and output.prompt_logprobs is not None:
        choice.prompt_logprobs = prompt_logprobs(
            output.prompt_token_ids, output.prompt_logprobs, request.prompt_logprobs
        )
    if request.return_token_ids:
        choice.token_ids = ids
        choice.prompt_token_ids = list(job.prompts[position].ids)
    return choice


def _joined(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    return TextLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )

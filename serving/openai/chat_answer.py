"""What /v1/chat/completions answers, whole."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ropeway.runtime.outputs import CompletionOutput, RequestOutput
from ropeway.serving.openai.best_of import best
from ropeway.serving.openai.chat_job import ChatJob
from ropeway.serving.openai.logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    chat_logprobs,
    prompt_logprobs,
)
from ropeway.serving.openai.usage import Usage, usage_of
from ropeway.serving.parsing.pieces import CallArguments, CallStart, Content, Piece, Reasoning


class CalledFunction(msgspec.Struct, kw_only=True):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model wants made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    """`content` is null where there are only calls. The model's thinking goes by two names, which
    different clients read."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer of /v1/chat/completions. What follows `usage` comes where it was asked for."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


@dataclass(slots=True)
class Gathered:
    """The pieces of one choice, put together."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    _arguments: dict[int, list[str]] = field(default_factory=dict)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Take the next pieces."""
        for piece in pieces:
            if isinstance(piece, Content):
                self.content.append(piece.text)
            elif isinstance(piece, Reasoning):
                self.reasoning.append(piece.text)
            elif isinstance(piece, CallStart):
                self.calls.append(
                    ToolCall(
                        id=piece.call_id, function=CalledFunction(name=piece.name, arguments="")
                    )
                )
                self._arguments[piece.index] = []
            elif isinstance(piece, CallArguments):
                self._arguments[piece.index].append(piece.text)

    def message(self, job: ChatJob) -> AnswerMessage:
        """The whole message."""
        for call, texts in zip(self.calls, self._arguments.values(), strict=True):
            call.function.arguments = "".join(texts)
        content = job.echo + "".join(self.content)
        message = AnswerMessage(content=content if content or not self.calls else None)
        if self.reasoning and job.shows_reasoning:
            message.reasoning_content = message.reasoning = "".join(self.reasoning)
        if self.calls and job.use.legacy:
            message.function_call = self.calls[0].function
        elif self.calls:
            message.tool_calls = self.calls
        return message


def whole_chat(job: ChatJob, output: RequestOutput) -> ChatCompletion:
    """The answer. Slow where there is much reasoning to count: for a thread."""
    request = job.request
    gathered: list[Gathered] = []
    choices = []
    for index, chosen in enumerate(best(output.outputs, job.n)):
        made, choice = _choice(job, index, chosen)
        gathered.append(made)
        choices.append(choice)
    answer = ChatCompletion(
        id=job.answer_id,
        created=job.created,
        model=job.model,
        choices=choices,
        usage=usage_of(
            len(job.prompt.ids),
            sum(len(one.token_ids) for one in output.outputs),
            output.num_cached_tokens,
            sum(job.count_reasoning("".join(one.reasoning)) for one in gathered),
        ),
    )
    if request.prompt_logprobs is not None and output.prompt_logprobs is not None:
        answer.prompt_logprobs = prompt_logprobs(
            output.prompt_token_ids, output.prompt_logprobs, request.prompt_logprobs
        )
    if request.return_token_ids:
        answer.prompt_token_ids = list(job.prompt.ids)
    return answer


def _choice(job: ChatJob, index: int, chosen: CompletionOutput) -> tuple[Gathered, ChatChoice]:
    request = job.request
    parser = job.parser()
    gathered = Gathered()
    gathered.add(parser.push(chosen.text))
    gathered.add(parser.finish())
    choice = ChatChoice(
        index=index,
        message=gathered.message(job),
        finish_reason=job.finish_reason(chosen.finish_reason, parser),
        stop_reason=chosen.stop_reason,
    )
    if request.logprobs:
        choice.logprobs = ChatLogprobs(
            chat_logprobs(
                job.tokenizer,
                chosen.token_ids,
                chosen.logprobs or [],
                request.top_logprobs or 0,
                bool(request.return_tokens_as_token_ids),
            )
        )
    if request.return_token_ids:
        choice.token_ids = chosen.token_ids
    return gathered, choice

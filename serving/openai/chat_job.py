"""A chat request on its way: checked, rendered, handed to the engine. Used by every endpoint that
answers chats.
"""

import functools
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropeway.compiler.errors import RequestError
from ropeway.runtime.text.tokenizer import Tokenizer
from ropeway.serving.errors import ApiError
from ropeway.serving.http.context import ServerContext
from ropeway.serving.openai.beam import check_beams
from ropeway.serving.openai.chat_prompt import ChatPrompt, check_messages, encode_chat
from ropeway.serving.openai.meaning import refuse_unserved
from ropeway.serving.openai.messages import ChatRequest
from ropeway.serving.openai.prompts import needed_tokenizer
from ropeway.serving.openai.sampling import (
    check_modes,
    draws,
    room_for_answer,
    sampling_params,
)
from ropeway.serving.openai.structured import asked_form, form_field
from ropeway.serving.parsing.choose import ChatFormat, chat_format, make_parser
from ropeway.serving.parsing.constrain import constraint
from ropeway.serving.parsing.pieces import OutputParser
from ropeway.serving.parsing.tools import ToolUse, tool_use

if TYPE_CHECKING:
    from ropeway.runtime.sampling.params import SamplingParams
    from ropeway.serving.process.generation import Generation, Submission

_format = functools.lru_cache(maxsize=4)(chat_format)  # the same for all of a server's requests


@dataclass(frozen=True, slots=True)
class ChatJob:
    """What is needed to turn a generation into an answer."""

    request: ChatRequest
    answer_id: str
    created: int
    model: str
    tokenizer: Tokenizer
    form: ChatFormat
    use: ToolUse
    prompt: ChatPrompt
    n: int

    @property
    def echo(self) -> str:
        """What stands before an answer: the text of the continued message, if it is wanted."""
        return self.prompt.echo if self.request.echo else ""

    @property
    def shows_reasoning(self) -> bool:
        """Whether the caller sees the model's thinking."""
        return self.request.include_reasoning is not False

    def count_reasoning(self, text: str) -> int:
        """How many tokens the text of the model's thinking makes; the same however it came."""
        return len(self.tokenizer.encode(text, add_special_tokens=False)) if text else 0

    def parser(self) -> OutputParser:
        """A new parser, for one choice."""
        return make_parser(self.form, self.use, self.prompt.end)

    def finish_reason(self, reason: str, parser: OutputParser) -> str:
        """OpenAI's word for how a choice ended, whose text the parser has read."""
        if reason == "stop" and parser.called:
            return "function_call" if self.use.legacy else "tool_calls"
        return reason


async def prepare_chat(
    request: ChatRequest, context: ServerContext
) -> tuple[ChatJob, "Submission"]:
    """Check a chat request and render it in a thread.

    Raises ApiError or RequestError, with the path of what is wrong.
    """
    from ropeway.serving.process.generation import Submission  # noqa: PLC0415  (see TYPE_CHECKING)

    model = context.check_model(request.model)
    client, settings = context.client, context.settings
    _check(request)
    use = tool_use(request)
    limit = client.info.max_model_len  # 503 until the engine has said it
    tokenizer = needed_tokenizer(context, "messages")
    form = _format(settings, settings.chat_template or tokenizer.settings.chat_template)

    def render() -> tuple[ChatPrompt, "SamplingParams"]:
        special = settings.allow_special_tokens
        prompt = encode_chat(request, form, use, tokenizer, allow_special_tokens=special)
        prompt = _fitted(prompt, request, limit)
        return prompt, _params(request, form, use, tokenizer, prompt, limit=limit)

    try:
        prompt, params = await client.in_thread(render)
    except RequestError as error:
        raise in_callers_words(error, request) from error
    job = ChatJob(
        request=request,
        answer_id=f"chatcmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=model,
        tokenizer=tokenizer,
        form=form,
        use=use,
        prompt=prompt,
        n=request.n or 1,
    )
    priority, salt = request.priority or 0, request.cache_salt or ""
    return job, Submission(prompt.ids, params, priority=priority, salt=salt)


async def start_chat(
    request: ChatRequest, context: ServerContext, *, streaming: bool
) -> tuple[ChatJob, "Generation"]:
    """`prepare_chat`, and submit the request. Raises likewise, before anything runs."""
    job, submission = await prepare_chat(request, context)
    try:
        [generation] = await context.client.submit([submission], streaming=streaming)
    except RequestError as error:
        raise in_callers_words(error, request) from error
    return job, generation


def _check(request: ChatRequest) -> None:
    """What can be said without the model."""
    refuse_unserved(request)
    check_modes(request)
    if request.use_beam_search:
        check_beams(request)
    check_messages(request.messages)
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(request, name) == 0:
            raise ApiError(400, f"{name}: must be at least 1", param=name)
    both = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(both) > 1:
        raise ApiError(
            400, "max_tokens: contradicts max_completion_tokens: keep one", param="max_tokens"
        )
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs: only with logprobs: true", param="top_logprobs")
    if request.echo and not request.continue_final_message:
        raise ApiError(400, "echo: only with continue_final_message: true", param="echo")
    if request.add_special_tokens:
        raise ApiError(
            400, "add_special_tokens: the chat template writes them", param="add_special_tokens"
        )


def _limit_name(request: ChatRequest) -> str:
    return "max_tokens" if request.max_tokens is not None else "max_completion_tokens"


def _wanted(request: ChatRequest) -> int | None:
    if request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens


def _fitted(prompt: ChatPrompt, request: ChatRequest, limit: int) -> ChatPrompt:
    """The prompt, truncated to its last tokens if that is wanted."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return prompt
    keep = keep if keep >= 0 else max(limit - (_wanted(request) or 1), 0)
    if keep >= len(prompt.ids):
        return prompt
    return ChatPrompt(prompt.ids[len(prompt.ids) - keep :], prompt.end, prompt.echo)


def _params(
    request: ChatRequest,
    form: ChatFormat,
    use: ToolUse,
    tokenizer: Tokenizer,
    prompt: ChatPrompt,
    *,
    limit: int,
) -> "SamplingParams":
    drawn = draws(request)
    own: dict[str, Any] = {
        "n": drawn,
        "max_tokens": room_for_answer(
            len(prompt.ids),
            _wanted(request),
            limit,
            prompt="messages",
            max_tokens=_limit_name(request),
        ),
        "prompt_logprobs": request.prompt_logprobs,
    }
    if request.logprobs:
        own["logprobs"] = request.top_logprobs or 0
    elif drawn > (request.n or 1):
        own["logprobs"] = 0  # to tell the best
    form_of_text = constraint(form, use, tokenizer, prompt.end, asked_form(request))
    if form_of_text is not None:
        if request.use_beam_search:
            raise RequestError("tool_choice", "not with use_beam_search, but auto or none")
        own["structured_outputs"] = form_of_text
    if form.needs_special_tokens(use, tokenizer):
        own["skip_special_tokens"] = False
    return sampling_params(request, **own)


def in_callers_words(error: RequestError, request: ChatRequest) -> RequestError:
    """The engine's names of fields as a chat's caller knows them."""
    names = {
        "prompt": "messages",
        "max_tokens": _limit_name(request),
        "logprobs": "top_logprobs",
    }
    field = form_field(names.get(error.field, error.field), request)
    return error if field == error.field else RequestError(field, error.reason)

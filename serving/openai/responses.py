"""POST /v1/responses, whole and streamed.

Grammar of a stream: response.created, response.in_progress, the events of the items, and one of
response.completed, response.incomplete and response.failed; numbered from 0.
"""

import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request

from ropeway.compiler.errors import RequestError
from ropeway.runtime.outputs import CompletionDelta
from ropeway.serving.errors import ApiError
from ropeway.serving.http.body import json_answer, read_body
from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.endpoint import Answer, Endpoint
from ropeway.serving.http.event_stream import EventStream
from ropeway.serving.openai.chat_job import ChatJob, start_chat
from ropeway.serving.openai.generating import check_end
from ropeway.serving.openai.logprobs import TokenLogprob, chat_logprobs
from ropeway.serving.openai.responses_answer import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from ropeway.serving.openai.responses_fields import MessageItem, ResponsesRequest
from ropeway.serving.openai.responses_lower import decode_response_request, lower
from ropeway.serving.openai.responses_writer import EventLog, ItemWriter

if TYPE_CHECKING:
    from ropeway.serving.process.generation import Generation


async def responses(http: Request, context: ServerContext) -> Answer:
    """Answer an input."""
    body = await read_body(http, context)
    request = decode_response_request(body, context)
    lowered = lower(request)
    streaming = bool(request.stream)
    try:
        job, generation = await start_chat(lowered.request, context, streaming=streaming)
    except (ApiError, RequestError) as error:
        raise lowered.in_callers_words(error) from error
    writing = _Writing(request, job, generation)
    if streaming:
        return EventStream(writing.stream(), error_event=writing.failed)
    async with generation:
        output = await generation.output()
    [choice] = output.outputs
    check_end(choice.finish_reason, choice.stop_reason)
    delta = CompletionDelta(
        output.request_id,
        0,
        choice.text,
        choice.token_ids,
        choice.logprobs,
        choice.finish_reason,
        choice.stop_reason,
    )
    await context.client.in_thread(writing.take, delta)  # slow where there is much to parse
    return json_answer(writing.response)


class _Writing:
    """One response that is being written."""

    def __init__(self, request: ResponsesRequest, job: ChatJob, generation: "Generation") -> None:
        self.response = _begun(request, job)
        self._job = job
        self._generation = generation
        self._log = EventLog()
        self._writer = ItemWriter(self._log)
        self._parser = job.parser()
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text the parser holds back
        self._output_tokens = 0

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events; what came together is one item."""
        async with self._generation as generation:
            started = False
            while deltas := await generation.news():
                if not started:
                    self._log.add("response.created", response=self.response)
                    self._log.add("response.in_progress", response=self.response)
                    started = True
                for delta in deltas:
                    check_end(delta.finish_reason, delta.stop_reason)
                    self.take(delta)
                if events := self._log.take():
                    yield events

    def take(self, delta: CompletionDelta) -> None:
        """The next part of the answer."""
        self._output_tokens += len(delta.token_ids)
        if self._job.request.logprobs:
            self._logprobs += chat_logprobs(
                self._job.tokenizer,
                delta.token_ids,
                delta.logprobs or [],
                self._job.request.top_logprobs or 0,
                False,
            )
        pieces = [*self._parser.push(delta.text)] if delta.text else []
        if delta.finish_reason is not None:
            pieces += self._parser.finish()
        if pieces:
            self._writer.add(pieces, self._logprobs)
            self._logprobs = []
        if delta.finish_reason is not None:
            self._end(delta.finish_reason)

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that can't go on."""
        if self._writer.items:
            self._writer.finish("incomplete")
        response = self.response
        response.status = "failed"
        response.output = self._writer.items
        response.error = ResponseError(error.code or "server_error", error.message)
        self._log.add("response.failed", response=response)
        return self._log.take()

    def _end(self, reason: str) -> None:
        whole = reason != "length"
        self._writer.finish("completed" if whole else "incomplete")
        response = self.response
        response.output = self._writer.items
        response.usage = self._usage()
        response.status = "completed" if whole else "incomplete"
        if whole:
            response.completed_at = int(time.time())
        else:
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        self._log.add(f"response.{response.status}", response=response)

    def _usage(self) -> ResponseUsage:
        prompt, output = len(self._job.prompt.ids), self._output_tokens
        return ResponseUsage(
            prompt,
            InputTokensDetails(self._generation.cached_tokens),
            output,
            OutputTokensDetails(self._job.count_reasoning("".join(self._writer.reasoning))),
            prompt + output,
        )


def _begun(request: ResponsesRequest, job: ChatJob) -> Response:
    """The response before its first token, with what the request said."""
    given: dict[str, Any] = {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata,
        "parallel_tool_calls": request.parallel_tool_calls,
        "temperature": request.temperature,
        "tool_choice": request.tool_choice,
        "tools": request.tools,
        "top_logprobs": request.top_logprobs,
        "top_p": request.top_p,
        "prompt_cache_key": request.prompt_cache_key,
        "safety_identifier": request.safety_identifier,
        "user": request.user,
    }
    text = msgspec.to_builtins(request.text) if request.text else {}
    thinking = request.reasoning
    return Response(
        id=job.answer_id.replace("chatcmpl-", "resp_", 1),
        created_at=job.created,
        status="in_progress",
        model=job.model,
        text={"verbosity": "medium", **text, "format": text.get("format") or {"type": "text"}},
        reasoning={"effort": thinking.effort if thinking else None, "summary": None},
        **{name: value for name, value in given.items() if value is not None},
    )


ENDPOINTS = [
    Endpoint(
        "/v1/responses",
        "POST",
        responses,
        "Answer an input with items: text, reasoning, calls of functions",
        request_type=ResponsesRequest,
        response_type=Response,
        streams=True,
        untagged=(MessageItem,),
    )
]

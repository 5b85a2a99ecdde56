"""POST /v1/completions."""

import secrets
import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from ropeway.compiler.errors import RequestError
from ropeway.runtime.sampling.structured import StructuredOutputs
from ropeway.serving.http.body import json_answer, read_body
from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.endpoint import Answer
from ropeway.serving.http.event_stream import EventStream
from ropeway.serving.openai.beam import beam_search, check_beams
from ropeway.serving.openai.completion_answer import CompletionJob, whole_answer
from ropeway.serving.openai.completion_stream import stream_completion
from ropeway.serving.openai.decoding import decode_request
from ropeway.serving.openai.fields import CompletionRequest
from ropeway.serving.openai.generating import outputs_of
from ropeway.serving.openai.meaning import refuse_unserved
from ropeway.serving.openai.prompts import Prompt, read_prompts
from ropeway.serving.openai.sampling import (
    DEFAULT_MAX_TOKENS,
    check_modes,
    draws,
    room_for_answer,
    sampling_params,
)
from ropeway.serving.openai.structured import asked_form, check_form, form_field

if TYPE_CHECKING:
    from ropeway.serving.process.generation import Submission


async def completions(http: Request, context: ServerContext) -> Answer:
    """Continue one prompt or several."""
    body = await read_body(http, context)
    request = decode_request(body, CompletionRequest, context)
    model = context.check_model(request.model)
    refuse_unserved(request)
    check_modes(request)
    if request.use_beam_search:
        check_beams(request)
    client = context.client
    limit = client.info.max_model_len  # 503 until the engine has said it
    wanted = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    prompts = [_fitted(one, request, wanted, limit) for one in await read_prompts(request, context)]
    form = await _checked_form(request, context)
    job = CompletionJob(
        request=request,
        prompts=prompts,
        answer_id=f"cmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=model,
        tokenizer=client.tokenizer,
        n=request.n or 1,
        scores_only=wanted == 0,
    )
    submissions = _submissions(job, max(wanted, 1), form)
    if request.use_beam_search:
        outputs = [await beam_search(request, one, client, job.tokenizer) for one in submissions]
    elif request.stream:
        generations = await client.submit(submissions, streaming=True)
        return EventStream(stream_completion(job, generations, client.in_thread))
    else:
        outputs = await outputs_of(await client.submit(submissions, streaming=False))
    if job.heavy:
        return json_answer(await client.in_thread(whole_answer, job, outputs))
    return json_answer(whole_answer(job, outputs))


async def _checked_form(
    request: CompletionRequest, context: ServerContext
) -> StructuredOutputs | None:
    """What the text must look like. Raises RequestError when that can't be compiled."""
    form = asked_form(request)
    if form is None:
        return None
    try:
        await context.client.in_thread(check_form, form)
    except RequestError as error:
        raise RequestError(form_field(error.field, request), error.reason) from error
    return form


def _fitted(prompt: Prompt, request: CompletionRequest, wanted: int, limit: int) -> Prompt:
    """The prompt, truncated if that is wanted. Raises ApiError 400 when it leaves no room."""
    keep = request.truncate_prompt_tokens
    if keep is not None:
        prompt = prompt.truncated(keep if keep >= 0 else max(limit - max(wanted, 1), 0))
    room_for_answer(len(prompt.ids), wanted, limit, prompt="prompt", max_tokens="max_tokens")
    return prompt


def _submissions(
    job: CompletionJob, max_tokens: int, form: StructuredOutputs | None
) -> list["Submission"]:
    from ropeway.serving.process.generation import Submission  # noqa: PLC0415  (see TYPE_CHECKING)

    request = job.request
    own: dict[str, Any] = {
        "n": draws(request),
        "max_tokens": max_tokens,
        "structured_outputs": form,
    }
    if job.scores_only:
        own["n"] = job.n
    if request.logprobs is not None:
        own["logprobs"] = request.logprobs
    elif own["n"] > job.n:
        own["logprobs"] = 0  # to tell the best
    asked = [request.prompt_logprobs, request.logprobs if request.echo else None]
    if any(count is not None for count in asked):
        own["prompt_logprobs"] = max(count for count in asked if count is not None)
    params = sampling_params(request, **own)
    return [
        Submission(
            prompt_ids=prompt.ids,
            params=params,
            prompt_text=prompt.text,
            priority=request.priority or 0,
            salt=request.cache_salt or "",
        )
        for prompt in job.prompts
    ]

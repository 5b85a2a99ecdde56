"""POST /v1/chat/completions."""

from starlette.requests import Request

from ropeway.compiler.errors import RequestError
from ropeway.serving.http.body import json_answer, read_body
from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.endpoint import Answer
from ropeway.serving.http.event_stream import EventStream
from ropeway.serving.openai.beam import beam_search
from ropeway.serving.openai.chat_answer import whole_chat
from ropeway.serving.openai.chat_job import in_callers_words, prepare_chat, start_chat
from ropeway.serving.openai.chat_stream import stream_chat
from ropeway.serving.openai.decoding import decode_request
from ropeway.serving.openai.generating import outputs_of
from ropeway.serving.openai.messages import ChatRequest


async def chat_completions(http: Request, context: ServerContext) -> Answer:
    """Answer a conversation."""
    body = await read_body(http, context)
    request = decode_request(body, ChatRequest, context)
    if request.stream:
        return EventStream(stream_chat(*await start_chat(request, context, streaming=True)))
    if request.use_beam_search:
        job, submission = await prepare_chat(request, context)
        try:
            output = await beam_search(request, submission, context.client, job.tokenizer)
        except RequestError as error:
            raise in_callers_words(error, request) from error
    else:
        job, generation = await start_chat(request, context, streaming=False)
        [output] = await outputs_of([generation])
    return json_answer(await context.client.in_thread(whole_chat, job, output))

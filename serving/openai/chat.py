"""POST /v1/chat/completions."""

from starlette.requests import Request

from ropeway.serving.http.body import json_answer, read_body
from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.endpoint import Answer
from ropeway.serving.http.event_stream import EventStream
from ropeway.serving.openai.chat_answer import whole_chat
from ropeway.serving.openai.chat_job import start_chat
from ropeway.serving.openai.chat_stream import stream_chat
from ropeway.serving.openai.decoding import decode_request
from ropeway.serving.openai.generating import outputs_of
from ropeway.serving.openai.messages import ChatRequest


async def chat_completions(http: Request, context: ServerContext) -> Answer:
    """Answer a conversation."""
    body = await read_body(http, context)
    request = decode_request(body, ChatRequest, context)
    streaming = bool(request.stream)
    job, generation = await start_chat(request, context, streaming=streaming)
    if streaming:
        return EventStream(stream_chat(job, generation))
    [output] = await outputs_of([generation])
    return json_answer(await context.client.in_thread(whole_chat, job, output))

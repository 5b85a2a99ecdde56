"""The generation endpoints, as the application wants them."""

from ropeway.serving.http.endpoint import Endpoint
from ropeway.serving.openai.chat import chat_completions
from ropeway.serving.openai.chat_answer import ChatCompletion
from ropeway.serving.openai.completion_answer import Completion
from ropeway.serving.openai.completions import completions
from ropeway.serving.openai.fields import CompletionRequest
from ropeway.serving.openai.messages import ChatRequest

ENDPOINTS = [
    Endpoint(
        "/v1/completions",
        "POST",
        completions,
        "Continue prompts",
        request_type=CompletionRequest,
        response_type=Completion,
        streams=True,
    ),
    Endpoint(
        "/v1/chat/completions",
        "POST",
        chat_completions,
        "Answer a conversation",
        request_type=ChatRequest,
        response_type=ChatCompletion,
        streams=True,
    ),
]

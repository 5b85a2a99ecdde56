"""The generation endpoints, as the application wants them."""

from ropeway.serving.http.endpoint import Endpoint
from ropeway.serving.openai.completion_answer import Completion
from ropeway.serving.openai.completions import completions
from ropeway.serving.openai.fields import CompletionRequest

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
]

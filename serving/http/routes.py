"""Every endpoint of the server, in one list."""

from ropeway.serving.http import exposition, health, models, tokenize
from ropeway.serving.http.endpoint import Endpoint
from ropeway.serving.http.openapi import openapi_endpoint
from ropeway.serving.openai import endpoints as generation
from ropeway.serving.openai import responses
from ropeway.serving.page import files


def all_endpoints() -> list[Endpoint]:
    """What is documented, and its description."""
    documented = [
        *generation.ENDPOINTS,
        *responses.ENDPOINTS,
        *models.ENDPOINTS,
        *tokenize.ENDPOINTS,
        *health.ENDPOINTS,
        *exposition.ENDPOINTS,
    ]
    return [*documented, openapi_endpoint(documented), *files.ENDPOINTS]

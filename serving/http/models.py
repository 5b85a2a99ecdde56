"""The models that are served: one, under each of its names."""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ropeway.serving.http.body import json_answer
from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.endpoint import Endpoint


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's model object; `root` is the model's own name, `max_model_len` in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ropeway"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All names."""

    object: Literal["list"] = "list"
    data: list[Model]


async def list_models(request: Request, context: ServerContext) -> Response:
    """Every name that a request's `model` may have."""
    return json_answer(ModelList(data=[_model(name, context) for name in context.model_names]))


async def get_model(request: Request, context: ServerContext) -> Response:
    """One of them."""
    return json_answer(_model(context.check_model(request.path_params["model"]), context))


def _model(name: str, context: ServerContext) -> Model:
    info = context.client.info
    return Model(
        id=name, created=context.started, root=info.model, max_model_len=info.max_model_len
    )


ENDPOINTS = [
    Endpoint("/v1/models", "GET", list_models, "List the models.", response_type=ModelList),
    # A name may hold slashes, as a hub's do.
    Endpoint("/v1/models/{model:path}", "GET", get_model, "One model.", response_type=Model),
]

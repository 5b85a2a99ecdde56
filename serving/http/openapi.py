"""/openapi.json: OpenAPI 3.1, made of what the endpoints say of themselves."""

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ropeway.compiler.version import VERSION
from ropeway.serving.http.body import JsonAnswer
from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.endpoint import Endpoint

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(:\w+)?\}")


class ErrorObject(msgspec.Struct, frozen=True):
    """What went wrong; `param` is the field, as the caller wrote it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every answer with a status from 400 up."""

    error: ErrorObject


def describe(endpoints: Iterable[Endpoint], *, keys: bool) -> dict[str, Any]:
    """The document; `keys`: an API key is asked for where an endpoint isn't open."""
    listed = list(endpoints)
    types = [t for e in listed for t in (e.request_type, e.response_type) if t is not None]
    unique = list(dict.fromkeys([*types, ErrorAnswer]))
    schemas, components = msgspec.json.schema_components(unique, ref_template=_REF)
    for struct in (struct for endpoint in listed for struct in endpoint.untagged):
        _make_tag_optional(components, struct)
    named = dict(zip(unique, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in listed:
        path = _PARAMETER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, named, keys)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Ropeway", "version": VERSION},
        "paths": paths,
        "components": {"schemas": components},
    }
    if keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _make_tag_optional(components: dict[str, Any], struct: type) -> None:
    """A union with such a member has no discriminator either."""
    tag = struct.__struct_config__.tag_field  # type: ignore[attr-defined]
    components[struct.__name__]["required"].remove(tag)
    reference = _REF.format(name=struct.__name__)
    for component in components.values():
        _drop_discriminators(component, reference)


def _drop_discriminators(schema: Any, reference: str) -> None:
    if isinstance(schema, list):
        for item in schema:
            _drop_discriminators(item, reference)
    if isinstance(schema, dict):
        mapping = schema.get("discriminator", {}).get("mapping", {})
        if reference in mapping.values():
            del schema["discriminator"]
        for item in schema.values():
            _drop_discriminators(item, reference)


def _operation(endpoint: Endpoint, schemas: dict[Any, Any], keys: bool) -> dict[str, Any]:
    error = {"description": "An error.", "content": _json(schemas[ErrorAnswer])}
    content = {"text/plain": {"schema": {"type": "string"}}}
    if endpoint.response_type is not None:
        content = _json(schemas[endpoint.response_type])
    if endpoint.streams:
        content["text/event-stream"] = {}  # 3.1 has no words for a schema of events
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": _operation_id(endpoint),
        "responses": {
            "200": {"description": "Done.", "content": content},
            "4XX": error,
            "5XX": error,
        },
    }
    if endpoint.request_type is not None:
        operation["requestBody"] = {
            "required": True,
            "content": _json(schemas[endpoint.request_type]),
        }
    parameters = [
        {"name": found[1], "in": "path", "required": True, "schema": {"type": "string"}}
        for found in _PARAMETER.finditer(endpoint.path)
    ]
    if parameters:
        operation["parameters"] = parameters
    if keys and not endpoint.open:
        operation["security"] = [{"key": []}]
    return operation


def _operation_id(endpoint: Endpoint) -> str:
    return re.sub(r"\W+", "_", f"{endpoint.method.lower()}{endpoint.path}").strip("_")


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def openapi_endpoint(others: Iterable[Endpoint]) -> Endpoint:
    """The endpoint that describes `others`; the document is made when it is first asked for."""
    listed = list(others)
    made: list[bytes] = []

    async def openapi(request: Request, context: ServerContext) -> Response:
        if not made:
            keys = bool(context.settings.api_keys)
            made.append(msgspec.json.encode(describe(listed, keys=keys)))
        return JsonAnswer(made[0])

    return Endpoint("/openapi.json", "GET", openapi, "This description.", open=True)

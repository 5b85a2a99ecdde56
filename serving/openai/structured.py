"""The form that an answer must have, by either of the fields that ask for one."""

from ropeway.compiler.errors import RequestError
from ropeway.runtime.sampling.structured import FIELD, StructuredOutputs
from ropeway.serving.openai.fields import GenerationFields, JsonObjectFormat, JsonSchemaFormat


def asked_form(request: GenerationFields) -> StructuredOutputs | None:
    """What the request asks of the text. Raises RequestError when two fields do."""
    wanted = request.response_format
    by_format: StructuredOutputs | None = None
    if isinstance(wanted, JsonObjectFormat):
        by_format = StructuredOutputs(json_object=True)
    elif isinstance(wanted, JsonSchemaFormat):
        # OpenAI has the schema optional: without one any JSON object will do.
        schema = wanted.json_schema.schema
        by_format = (
            StructuredOutputs(json_object=True)
            if schema is None
            else StructuredOutputs(json=schema)
        )
    if request.structured_outputs is None:
        return by_format
    if by_format is not None:
        raise RequestError(FIELD, "response_format is given too: keep one")
    return request.structured_outputs


def check_form(form: StructuredOutputs) -> None:
    """Whether it can be compiled; slow. Raises RequestError."""
    from ropeway.runtime.structured.check import check_structured  # noqa: PLC0415  (slow to import)

    check_structured(form)


def form_field(field: str, request: GenerationFields) -> str:
    """The field to blame for a form that can't be: where the caller asked for it."""
    if not field.startswith(FIELD) or request.structured_outputs is not None:
        return field
    if isinstance(request.response_format, JsonSchemaFormat):
        return "response_format.json_schema.schema"
    return "response_format" if request.response_format is not None else "tools"

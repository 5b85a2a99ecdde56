"""From a request's bytes to its struct; what is wrong is named by its path."""

import difflib
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from ropeway.serving.errors import ApiError
from ropeway.serving.http.context import ServerContext

T = TypeVar("T", bound=msgspec.Struct)

_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_PLACE = re.compile(r" - at (?:`key` in )?`\$(?P<path>[^`]*)`$")
_STEP = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+)\]|\[\.\.\.\]")
_LONG_NAME = 100  # characters of a field's name that are repeated to the caller
_MAX_WARNINGS = 64  # fields of one request that are dropped with a warning
_CODE = re.compile(r"`[a-z| ]+`")
_WORDS = {
    "object": "an object",
    "array": "a list",
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}


def decode_request(body: bytes, kind: type[T], context: ServerContext) -> T:
    """The request in `body`. Raises ApiError 400 for what isn't JSON or doesn't fit `kind`.

    Unknown fields are refused, or dropped and logged where the settings say so.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if context.settings.unknown_fields == "refuse" or _unknown_name(error) is None:
            raise _refusal(error, kind) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the body isn't JSON: {error}", code="invalid_json") from error
    return _decode_leniently(msgspec.json.decode(body), kind, context)


def _decode_leniently(value: Any, kind: type[T], context: ServerContext) -> T:
    """As above, without the fields that nobody knows."""
    for _ in range(_MAX_WARNINGS):
        try:
            return msgspec.convert(value, kind, str_keys=True)
        except msgspec.ValidationError as error:
            name, path = _unknown_name(error), _path(error)
            if name is None:
                raise _refusal(error, kind) from error
            _walk_value(value, path).pop(name, None)
            context.log.warning(
                f"a request's field was ignored: {_unknown_field(path, name, kind)}"
            )
    raise ApiError(400, f"the request has more than {_MAX_WARNINGS} unknown fields")


def _refusal(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> ApiError:
    path = _path(error)
    name = _unknown_name(error)
    if name is not None:
        param = f"{path}.{name}" if path else name
        message = _unknown_field(path, name, kind)
        return ApiError(400, message, param=param[:200], code="unknown_parameter")
    why = _PLACE.sub("", str(error))
    missing = re.match(r"^Object missing required field `(.*)`$", why)
    if missing is not None:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return ApiError(400, f"{param}: is missing", param=param, code="missing_required_parameter")
    why = _CODE.sub(lambda found: _in_words(found[0]), why)
    why = why[:1].lower() + why[1:]
    return ApiError(400, f"{path or 'the body'}: {why}", param=path or None, code="invalid_value")


def _in_words(code: str) -> str:
    """`int | null` as "a whole number or null"."""
    return " or ".join(_WORDS.get(one, one) for one in code.strip("`").split(" | "))


def _unknown_name(error: msgspec.ValidationError) -> str | None:
    found = _UNKNOWN.match(_PLACE.sub("", str(error)))
    return found["name"] if found else None


def _unknown_field(path: str, name: str, kind: type[msgspec.Struct]) -> str:
    shown = name if len(name) <= _LONG_NAME else name[: _LONG_NAME - 3] + "..."
    nearest = _nearest(name, _names_at(kind, path)) if len(name) <= _LONG_NAME else None
    advice = f"did you mean {nearest!r}?" if nearest else "see /openapi.json for those that exist"
    return f"{path + '.' if path else ''}{shown}: there is no such field: {advice}"


def _nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that looks most like `name`, or holds it whole."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return next(iter([*close, *(one for one in known if name in one)]), None)


def _path(error: msgspec.ValidationError) -> str:
    """Where a value is wrong, as a caller would write it: messages[2].content[0].type."""
    place = _PLACE.search(str(error))
    return place["path"].removeprefix(".").replace("[...]", "") if place else ""


def _walk_value(value: Any, path: str) -> Any:
    for step in _STEP.finditer(f".{path}" if path else ""):
        value = value[step["name"]] if step["name"] else value[int(step["index"])]
    return value


def _names_at(kind: type[msgspec.Struct], path: str) -> list[str]:
    """The fields that an object at `path` may have."""
    types: list[Any] = [msgspec.inspect.type_info(kind)]
    for step in _STEP.finditer(f".{path}" if path else ""):
        types = [inner for one in types for inner in _inside(one, step["name"])]
    return [field.encode_name for one in types for field in getattr(one, "fields", ())]


def _inside(kind: Any, name: str | None) -> list[Any]:
    """The types of an object's field, or of a list's items (`name` None)."""
    inner: list[Any] = []
    if name is None:
        inner = [kind.item_type] if isinstance(kind, msgspec.inspect.ListType) else []
    elif isinstance(kind, msgspec.inspect.StructType):
        inner = [field.type for field in kind.fields if field.encode_name == name]
    return [one for each in inner for one in getattr(each, "types", (each,))]

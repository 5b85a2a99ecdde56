"""Passes as text: `canonicalize,fuse-attention{block-size=32}`, read and written.

Grammar:  spec    = [ pass { "," pass } ]
          pass    = name [ "{" [ option { "," option } ] "}" ]
          option  = name "=" value
          value   = "true" | "false" | number | JSON string | "[" [ value { "," value } ] "]"
Names are kebab-case; option `block-size` is the dataclass field `block_size`. Only options that
differ from their defaults are printed, so the text of a pipeline is canonical.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ropeway.compiler.errors import IRSyntaxError, PipelineError
from ropeway.compiler.pipeline.base import Pass

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*")
          |(?P<number>-?(?:inf|nan|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?))(?![\w-])
          |(?P<name>[A-Za-z_][\w-]*)
          |(?P<mark>[{}\[\],=]))""",
    re.VERBOSE,
)


def print_pass(item: Pass) -> str:
    """The spec of one pass, with the options that differ from their defaults."""
    options = [
        f"{field.name.replace('_', '-')}={_print_value(getattr(item, field.name))}"
        for field in dataclasses.fields(item)
        if field.default is dataclasses.MISSING or getattr(item, field.name) != field.default
    ]
    return item.name + ("{" + ", ".join(options) + "}" if options else "")


def print_spec(passes: Iterable[Pass]) -> str:
    return ",".join(print_pass(item) for item in passes)


def parse_spec(text: str, catalogue: Mapping[str, type[Pass]]) -> list[Pass]:
    """The passes that `text` names, with their options.

    Raises IRSyntaxError on bad text and PipelineError on an unknown pass or option.
    """
    return _Parser(text, catalogue).spec()


def _print_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_print_value(item) for item in value) + "]"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value)
    raise PipelineError(
        f"pass option of type {type(value).__name__} can't be written in a spec: "
        "use bool, int, float, str or a tuple of these"
    )


class _Parser:
    def __init__(self, text: str, catalogue: Mapping[str, type[Pass]]) -> None:
        self.text = text
        self.at = 0
        self.catalogue = catalogue

    def spec(self) -> list[Pass]:
        passes: list[Pass] = []
        if not self.text.strip():
            return passes
        passes.append(self.one_pass())
        while self.take(","):
            passes.append(self.one_pass())
        if self.text[self.at :].strip():
            self.fail("',' or the end of the spec")
        return passes

    def one_pass(self) -> Pass:
        name = self.name("the name of a pass")
        if name not in self.catalogue:
            raise PipelineError(f"pass '{name}': unknown{_nearest(name, self.catalogue)}")
        options: dict[str, Any] = {}
        if self.take("{") and not self.take("}"):
            self.option(options)
            while self.take(","):
                self.option(options)
            self.expect("}")
        return build_pass(self.catalogue[name], options)

    def option(self, options: dict[str, Any]) -> None:
        name = self.name("the name of an option").replace("-", "_")
        if name in options:
            raise PipelineError(f"option '{name.replace('_', '-')}' is given twice; keep one")
        self.expect("=")
        options[name] = self.value()

    def value(self) -> Any:
        if self.take("["):
            items: list[Any] = []
            if self.take("]"):
                return tuple(items)
            items.append(self.value())
            while self.take(","):
                items.append(self.value())
            self.expect("]")
            return tuple(items)
        kind, token = self.token()
        if kind == "name" and token in ("true", "false"):
            return token == "true"
        if kind == "name" and token in ("inf", "nan"):
            return float(token)
        if kind == "number":
            return int(token) if re.fullmatch(r"-?\d+", token) else float(token)
        if kind == "string":
            return json.loads(token)
        self.fail("a value (true, false, a number, a string in quotes, [...])")

    def name(self, wanted: str) -> str:
        kind, token = self.token()
        if kind != "name":
            self.fail(wanted)
        return token

    def take(self, mark: str) -> bool:
        found = _TOKEN.match(self.text, self.at)
        if found is None or found["mark"] != mark:
            return False
        self.at = found.end()
        return True

    def expect(self, mark: str) -> None:
        if not self.take(mark):
            self.fail(f"'{mark}'")

    def token(self) -> tuple[str, str]:
        found = _TOKEN.match(self.text, self.at)
        if found is None or found.lastgroup is None:
            return "end", ""
        if found.lastgroup != "mark":
            self.at = found.end()
        return found.lastgroup, found[found.lastgroup]

    def fail(self, wanted: str) -> Any:
        raise IRSyntaxError(
            f"pass spec, column {self.at + 1}: expected {wanted} before "
            f"{self.text[self.at : self.at + 20]!r}; write passes as name or name{{option=value}}"
        )


def build_pass(kind: type[Pass], options: Mapping[str, Any]) -> Pass:
    """A pass of `kind` with checked options. Raises PipelineError naming the bad option."""
    known = [field.name for field in dataclasses.fields(kind)]
    for name in options:
        if name not in known:
            shown = [field.replace("_", "-") for field in known]
            raise PipelineError(
                f"pass '{kind.name}' has no option '{name.replace('_', '-')}'; "
                f"it has: {', '.join(shown) or 'none'}"
            )
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        raise PipelineError(f"pass '{kind.name}': {error}") from error


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean '{close[0]}'?" if close else "; `ropeway opt --list` names them all"

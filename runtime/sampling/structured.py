"""What a caller may ask of a choice's text: StructuredOutputs, checked for its form alone.

Whether it can be compiled is for `ropeway.runtime.structured` to say.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ropeway.compiler.errors import RequestError

Kind = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FIELD = "structured_outputs"


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form that the generated text must have; names as vLLM users know them.

    Exactly one of: `json`, a JSON schema as an object or its text; `regex`, which the whole text
    must match; `choice`, texts of which it is one; `grammar`, in Lark or GBNF notation;
    `json_object` true, any JSON object; `structural_tag`, free text in which a trigger begins a
    tagged part: {"structures": [{"begin", "schema", "end"}], "triggers": [...]} as an object or its
    text.

    For JSON: `disable_any_whitespace` allows none between its parts, `whitespace_pattern` is the
    expression for what is allowed there, and `disable_additional_properties` closes each object
    that doesn't say itself whether it takes more.

    Raises RequestError, with the field's name.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:  # as if it weren't given
            msgspec.structs.force_setattr(self, "json_object", None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                FIELD, f"give exactly one of {', '.join(KINDS)}; got {', '.join(given) or 'none'}"
            )
        _check_type("json", self.json, dict | str, "a JSON schema as an object or its text")
        _check_type("regex", self.regex, str, "a regular expression as text")
        _check_type("grammar", self.grammar, str, "a Lark or GBNF grammar as text")
        _check_type("json_object", self.json_object, bool, "true or false")
        _check_type("structural_tag", self.structural_tag, dict | str, "an object or its text")
        _check_type("whitespace_pattern", self.whitespace_pattern, str, "a regular expression")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{FIELD}.{name}", "must be true or false")
        self._check_choice()
        self._check_options()

    def _check_choice(self) -> None:
        given: Any = self.choice
        if given is None:
            return
        if isinstance(given, str | bytes) or not isinstance(given, Sequence) or not given:
            raise RequestError(f"{FIELD}.choice", "must be a list of at least one text")
        for index, text in enumerate(given):
            if not isinstance(text, str) or not text:
                raise RequestError(
                    f"{FIELD}.choice", f"entry {index} must be a text that isn't empty"
                )
        msgspec.structs.force_setattr(self, "choice", tuple(dict.fromkeys(given)))

    def _check_options(self) -> None:
        if self.kind in ("json", "json_object"):
            if self.disable_any_whitespace and self.whitespace_pattern is not None:
                raise RequestError(
                    f"{FIELD}.whitespace_pattern", "contradicts disable_any_whitespace"
                )
            return
        for name in (
            "disable_any_whitespace",
            "disable_additional_properties",
            "whitespace_pattern",
        ):
            if getattr(self, name):
                raise RequestError(f"{FIELD}.{name}", f"has no meaning for {self.kind}")

    @property
    def kind(self) -> Kind:
        """Which of the forms is asked for."""
        return next(name for name in KINDS if getattr(self, name) is not None)


def _check_type(name: str, value: Any, wanted: Any, expected: str) -> None:
    if value is not None and not isinstance(value, wanted):
        raise RequestError(f"{FIELD}.{name}", f"must be {expected}, not {type(value).__name__}")

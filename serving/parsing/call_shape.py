"""How calls are written in each format: for constraints, and for what a model is told.

Each call is head + name + middle + arguments + tail; calls have `between` between them, and `begin`
and `end` around all of them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ropeway.serving.parsing import hermes, mistral


@dataclass(frozen=True, slots=True)
class CallShape:
    """A way to write calls that the parser of its format reads."""

    head: str
    middle: str
    tail: str
    between: str
    begin: str = ""
    end: str = ""

    def call(self, name: str, arguments: str) -> str:
        """One call; `arguments` is JSON text."""
        return f"{self.head}{name}{self.middle}{arguments}{self.tail}"

    def text(self, calls: Sequence[tuple[str, object]]) -> str:
        """Calls of functions with their arguments, as a model would write them."""
        written = [self.call(name, to_json(arguments)) for name, arguments in calls]
        return f"{self.begin}{self.between.join(written)}{self.end}"


HERMES = CallShape(
    head=f'{hermes.OPEN.text}\n{{"name": "',
    middle='", "arguments": ',
    tail=f"}}\n{hermes.CLOSE.text}",
    between="\n",
)
LLAMA3_JSON = CallShape(head='{"name": "', middle='", "parameters": ', tail="}", between="; ")
MISTRAL = CallShape(
    head='{"name": "',
    middle='", "arguments": ',
    tail="}",
    between=", ",
    begin=f"{mistral.CALLS.text} [",
    end="]",
)
MISTRAL_NAMED = CallShape(head=mistral.CALLS.text, middle=mistral.ARGUMENTS, tail="", between="")


def to_json(value: object) -> str:
    """JSON text as models were shown it: with a space behind every comma and colon."""
    return json.dumps(value, ensure_ascii=False)

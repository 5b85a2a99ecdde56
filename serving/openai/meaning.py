"""What becomes of OpenAI's fields that have no meaning here: one table for code and docs.

A field of the published schema that stands in neither table is served.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ropeway.serving.errors import ApiError

# Accepted and without effect: the answer is the same whatever they say.
NO_MEANING = {
    "metadata": "nothing is stored",
    "prediction": "only speeds a provider up; the answer is the same",
    "prompt_cache_breakpoint": "prefixes are cached block by block",
    "prompt_cache_key": "prefixes are cached by their content; cache_salt keeps users apart",
    "prompt_cache_options": "prefixes are cached by their content",
    "prompt_cache_retention": "prefixes stay cached until their blocks are needed",
    "safety_identifier": "no user is tracked",
    "service_tier": "there is one tier; priority orders requests",
    "spaces_between_special_tokens": "text is decoded byte by byte: nothing is put between tokens",
    "store": "nothing is stored",
    "stream_options.include_obfuscation": "chunks aren't padded",
    "user": "no user is tracked",
    "verbosity": "a wish to one provider's models",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """`why`, with the next step; `when` says which values are refused (default: all but null)."""

    why: str
    when: Callable[[Any], bool] = lambda value: True


# Known to OpenAI, but the answer would be another than the caller expects: 400.
REFUSED = {
    "audio": Refusal("this server answers in text only: leave it out"),
    "modalities": Refusal(
        "this server answers in text only: leave it out, or give ['text']",
        lambda value: value != ["text"],
    ),
    "moderation": Refusal("nothing is moderated here: leave it out"),
    "suffix": Refusal(
        "text can't be inserted before a suffix: leave it out", lambda value: value != ""
    ),
    "web_search_options": Refusal("this server can't search the web: leave it out"),
}


def refuse_unserved(request: msgspec.Struct) -> None:
    """Raises ApiError 400 for the first field whose value can't be served."""
    for name, refusal in REFUSED.items():
        value = getattr(request, name, None)
        if value is not None and refusal.when(value):
            raise ApiError(400, f"{name}: {refusal.why}", param=name, code="unsupported_parameter")

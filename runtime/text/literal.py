"""Which special tokens of a rendered chat were written by the template, and which by a user.

The template's may become special-token ids; a user's "<|im_end|>" must stay text. Both are the
same characters once rendered, so the chat is rendered a second time with characters of the users'
text that special tokens begin or end with replaced by stand-ins (private-use characters drawn anew
each time). Stand-ins take one place each, so when undoing them gives the first rendering, every
special token still visible in the second is the template's, and at the same place.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ropeway.compiler.errors import RequestError

Span = tuple[int, int]

_PRIVATE = range(0xF0000, 0xFFFFE)
_TRUSTED_KEYS = frozenset({"role", "type"})  # the template's vocabulary, not the user's text


class SpecialTexts:
    """The texts of a tokenizer's special tokens, found longest first as a tokenizer does."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted({t for t in texts if t}, key=lambda t: (-len(t), t)))
        alternatives = "|".join(map(re.escape, self.texts))
        self._pattern = re.compile(alternatives) if self.texts else None
        self._starts = re.compile(f"(?={alternatives})") if self.texts else None
        self.edges = frozenset(t[0] for t in self.texts) | {t[-1] for t in self.texts}

    def spans(self, text: str) -> list[Span]:
        """Where special tokens stand, from left to right."""
        return [m.span() for m in self._pattern.finditer(text)] if self._pattern else []

    def risky_places(self, text: str) -> set[int]:
        """Places of `text` to hide so that no special token can hold a part of it: the first
        character of each one in it or begun at its end, the last of one ended at its start."""
        if self._starts is None:
            return set()
        places = {m.start() for m in self._starts.finditer(text)}
        tail = text.rstrip()
        head = len(text) - len(text.lstrip())
        for special in self.texts:
            for k in range(1, len(special)):
                if tail.endswith(special[:k]):
                    places.add(len(tail) - k)
                if text.startswith(special[k:], head):
                    places.add(head + len(special) - k - 1)
        return places


def template_spans(
    render: Callable[[Mapping[str, Any]], str], variables: Mapping[str, Any], specials: SpecialTexts
) -> tuple[str, list[Span] | None]:
    """The rendered chat, and the spans of the template's special tokens in it.

    `variables` are the template's inputs that hold users' text. The spans are None when every
    special token is the template's, so that plain encoding is right. Raises RequestError when a
    template rewrites text that holds special tokens, so that they can't be told apart.
    """
    text = render(variables)
    found = specials.spans(text)
    used = sorted(specials.edges & _characters(variables))
    if not used:
        return text, None
    hidden_of, shown_of = _stand_ins(text, used)

    def hide_all(part: str) -> str:
        return part.translate(hidden_of)

    def hide_risky(part: str) -> str:
        return _hide_places(part, specials.risky_places(part), hidden_of)

    # All such characters first, which proves most. A template that looks into the text (for
    # "</think>", say) may then render otherwise: next only those that a special token could hold.
    for hide in (hide_all, hide_risky):
        hidden = render(_hide(variables, hide))
        if hidden.translate(shown_of) == text:
            spans = specials.spans(hidden)
            return text, None if spans == found else spans
    raise RequestError(
        "messages",
        "the chat template rewrites a message that holds the text of a special token, "
        f"such as {specials.texts[-1]!r}: remove it from the message",
    )


def _stand_ins(text: str, used: Sequence[str]) -> tuple[dict[int, int], dict[int, int]]:
    taken = {ord(c) for c in text if ord(c) >= _PRIVATE.start}
    hidden: dict[int, int] = {}
    for character in used:
        code = secrets.choice(_PRIVATE)
        while code in taken:
            code = secrets.choice(_PRIVATE)
        taken.add(code)
        hidden[ord(character)] = code
    return hidden, {v: k for k, v in hidden.items()}


def _hide_places(text: str, places: set[int], hidden: Mapping[int, int]) -> str:
    characters = list(text)
    for place in places:
        characters[place] = chr(hidden[ord(characters[place])])
    return "".join(characters)


def _hide(value: Any, change: Callable[[str], str], trusted: bool = False) -> Any:
    """`value` with every user's string changed; keys, roles and types stay."""
    if isinstance(value, str):
        return value if trusted else change(value)
    if isinstance(value, Mapping):
        return {k: _hide(v, change, k in _TRUSTED_KEYS) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(v, change) for v in value]
    return value


def _characters(value: Any) -> set[str]:
    """All characters of the users' strings."""
    seen: set[str] = set()

    def note(text: str) -> str:
        seen.update(text)
        return text

    _hide(value, note)
    return seen

"""Stop strings: find them as the text grows, and hold back exactly what might become one.

Policy: the stop string that is complete first wins; of several complete at the same character, the
longest. This depends on the text alone, not on how tokens cut it. Held back is the longest end of
the text that is a proper prefix of a stop string, and nothing more.
"""

from functools import lru_cache

import msgspec


class StopStrings(msgspec.Struct, frozen=True):
    """An automaton over the stop strings (Aho and Corasick 1975); node 0 is the root.

    Per node: the `child` by character, the node of the longest proper suffix (`fail`), the longest
    stop string that ends here (`match`, or None) and how many characters to hold back (`hold`).
    """

    child: tuple[dict[str, int], ...]
    fail: tuple[int, ...]
    match: tuple[str | None, ...]
    hold: tuple[int, ...]

    def step(self, node: int, character: str) -> int:
        """The node after one more character; O(1) amortised."""
        while node and character not in self.child[node]:
            node = self.fail[node]
        return self.child[node].get(character, 0)


@lru_cache(maxsize=256)
def compile_stops(stops: tuple[str, ...]) -> StopStrings:
    """Builds the automaton; the stop strings aren't empty."""
    child: list[dict[str, int]] = [{}]
    match: list[str | None] = [None]
    depth = [0]
    for stop in stops:
        node = 0
        for character in stop:
            if character not in child[node]:
                child[node][character] = len(child)
                child.append({})
                match.append(None)
                depth.append(depth[node] + 1)
            node = child[node][character]
        match[node] = stop
    fail = [0] * len(child)
    hold = [0] * len(child)
    queue = list(child[0].values())
    for node in queue:  # in order of depth: a node's fail is ready before the node
        if match[node] is None:
            match[node] = match[fail[node]]
        hold[node] = depth[node] if child[node] else hold[fail[node]]
        for character, below in child[node].items():
            back = fail[node]
            while back and character not in child[back]:
                back = fail[back]
            fail[below] = child[back].get(character, 0)
            queue.append(below)
    return StopStrings(tuple(child), tuple(fail), tuple(match), tuple(hold))


class StopScanner:
    """Lets text through, minus what is held back, until a stop string is complete."""

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._stops = compile_stops(stops)
        self._include = include
        self._node = 0
        self._held = ""

    def feed(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Takes new text; returns what may be shown, and the stop string that ended it, if any.

        Unarmed (before min_tokens) no match counts, but one that ends in later text still does.
        After a match the text is cut before the stop string, or after it with `include`.
        """
        stops, node = self._stops, self._node
        buffer = self._held + text
        offset = len(self._held) + 1
        for i, character in enumerate(text):
            node = stops.step(node, character)
            found = stops.match[node]
            if found is not None and armed:
                end = offset + i
                self._held, self._node = "", 0
                return buffer[: end if self._include else end - len(found)], found
        self._node = node
        shown = len(buffer) - stops.hold[node]
        self._held = buffer[shown:]
        return buffer[:shown], None

    def release(self) -> str:
        """The held text, when the sequence ends without a stop string."""
        held, self._held, self._node = self._held, "", 0
        return held

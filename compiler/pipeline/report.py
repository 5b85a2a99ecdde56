"""What a pipeline run did, as data: in the artifact's reports/passes.json, shown by inspect.

Everything here is counted while the passes run; nothing is echoed from their options.
"""

from __future__ import annotations

import msgspec

MAX_NEAR_MISSES = 8


class MissReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One reason why a pattern didn't match: the op it failed on first, and how many like it."""

    op: str
    constraint: str
    loc: str
    count: int
    depth: int


class PassReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pass as it ran; `sites` are source lines or op names, in program order; times in ms."""

    name: str
    spec: str
    phase: str
    numerics: str
    matches: int
    sites: tuple[str, ...]
    near_misses: tuple[MissReport, ...]
    ms: float
    ops_before: int
    ops_after: int


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All passes of one run in order. `spec` is printed from the pass objects that ran."""

    spec: str
    passes: tuple[PassReport, ...]

    def matches(self, name: str) -> int:
        """How often the passes called `name` matched in all; 0 if none ran."""
        return sum(entry.matches for entry in self.passes if entry.name == name)

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def from_json(cls, data: bytes) -> Report:
        """Raises msgspec.ValidationError on unknown or mistyped fields."""
        return msgspec.json.decode(data, type=cls)

    def describe(self) -> str:
        """Lines for a person: a count for each pass, and for a fusion that missed, the reason."""
        lines: list[str] = []
        for entry in self.passes:
            lines.append(
                f"{entry.name:<20} {entry.matches:>5} matched  ops {entry.ops_before} -> "
                f"{entry.ops_after}  {entry.ms:.1f} ms  {entry.numerics}"
            )
            for miss in entry.near_misses:
                where = f" ({miss.loc})" if miss.loc else ""
                lines.append(f"    {miss.count} not matched: {miss.op}{where}: {miss.constraint}")
        return "\n".join(lines)

"""The table of cases names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_every_test_that_the_table_names_is_there() -> None:
    rows = (TESTS / "cases" / "README.md").read_text(encoding="utf-8").splitlines()
    named = 0
    for row in rows:
        file: Path | None = None
        for text in re.findall(r"`([a-z0-9_/.]*(?:::[a-z0-9_]+)?)(?:\[\w+\])?`", row):
            place, _, test = text.partition("::")
            if place in ("tests/", "cases/x") or not (test or "/" in place):
                continue
            if place:
                short = place.startswith("cases/") and "." not in place
                file = TESTS / (f"cases/test_{place[6:]}.py" if short else place)
            assert file is not None and file.exists(), text
            assert not test or f"def {test}(" in file.read_text(encoding="utf-8"), text
            named += 1
    assert named > 60

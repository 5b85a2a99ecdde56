"""Every pass on small IR: one that fires, one that must not, and the text that comes out."""

from __future__ import annotations

from pathlib import Path

import pytest

from ropeway.compiler.ir.parser import parse_module
from ropeway.compiler.ir.printer import print_module
from ropeway.compiler.ops.text import read_module
from ropeway.compiler.ops.verifier import verify
from ropeway.compiler.pipeline.base import PassContext
from ropeway.compiler.pipeline.pipeline import Pipeline
from ropeway.passes import CATALOGUE

GOLDENS = Path(__file__).parent / "goldens"
_PHASES = ("raise", "fuse", "cleanup")
OF_FUSION = [name for name, kind in CATALOGUE.items() if kind.phase in _PHASES]


def test_printed_ir_is_the_golden(golden, check_text):
    module = read_module(golden.text)
    result, report = Pipeline.parse(golden.spec, CATALOGUE).run(module, verify_each=True)
    for name, count in golden.matches:
        assert report.matches(name) == count
        assert len(next(entry.sites for entry in report.passes if entry.name == name)) == count
    text = print_module(result)
    assert check_text(golden.path, text), text
    assert parse_module(text) == result


def test_nearest_miss_names_constraint_op_and_line(golden):
    module = read_module(golden.text)
    state = module
    for item in Pipeline.parse(golden.spec, CATALOGUE):
        result = item.run(state, PassContext())
        if golden.miss is not None and item.phase in ("fuse", "raise"):
            assert str(result.nearest_miss()) == golden.miss
        state = result.module


def test_passes_leave_their_argument_alone(golden):
    module = read_module(golden.text)
    before = print_module(module)
    for item in Pipeline.parse(golden.spec, CATALOGUE):
        item.run(module, PassContext())
    assert print_module(module) == before


def test_a_pass_that_matched_nothing_changes_nothing(golden):
    module = read_module(golden.text)
    for item in Pipeline.parse(golden.spec, CATALOGUE):
        result = item.run(module, PassContext())
        if result.matches == 0:
            assert result.module == module
        verify(result.module)
        module = result.module


@pytest.mark.parametrize("name", OF_FUSION)
def test_every_pass_has_a_golden_that_fires_and_one_that_must_not(name):
    texts = [path.read_text() for path in GOLDENS.glob(f"{name}-*.ir")]
    counts = [
        int(line.split()[-1])
        for text in texts
        for line in text.splitlines()
        if line.startswith(f"# MATCHES: {name} ")
    ]
    assert any(count > 0 for count in counts)
    assert any(count == 0 for count in counts)

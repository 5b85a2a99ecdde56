"""Cleanup passes on random modules that hold every op: equal bits, a valid and printable result."""

from __future__ import annotations

from hypothesis import HealthCheck, given, reject, settings
from support.random_modules import modules

from ropeway.compiler.errors import InputError, RunError
from ropeway.compiler.ir.parser import parse_module
from ropeway.compiler.ir.printer import print_module
from ropeway.compiler.ops.verifier import verify
from ropeway.compiler.pipeline.pipeline import Pipeline
from ropeway.compiler.pipeline.probe import Probe
from ropeway.passes import CATALOGUE, default_pipeline

CLEANUP = Pipeline.parse("canonicalize,fold,cse,dce", CATALOGUE)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(modules())
def test_every_state_verifies_and_prints_back(module):
    for pipeline in (CLEANUP, default_pipeline()):
        state, _ = pipeline.run(module, verify_each=True)
        verify(state)
        assert parse_module(print_module(state)) == state


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(modules())
def test_cleaning_twice_changes_nothing_more(module):
    once, _ = CLEANUP.run(module)
    twice, report = CLEANUP.run(once)
    assert twice == once, report.describe()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(modules())
def test_cleanup_keeps_every_bit(module):
    try:
        probe = Probe(module, tokens=3)
        assert all(output.dim() for output in probe.reference)
    except (InputError, RunError):  # sizes that no input tells; one tensor of two types
        reject()
    state, _ = CLEANUP.run(module)
    assert probe.error(state) == 0

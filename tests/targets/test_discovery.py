"""Targets are found by entry point, and the log says which was activated and why."""

import importlib.metadata
import logging
import tomllib
from pathlib import Path

import pytest

from ropeway.compiler.errors import TargetError
from ropeway.compiler.targets import base
from ropeway.compiler.targets.base import activate, available_targets, device_class


@pytest.fixture
def entries(monkeypatch):
    """entries(*points): what is installed, for one test."""

    def install(*points: tuple[str, str]) -> None:
        found = [importlib.metadata.EntryPoint(name, value, base.GROUP) for name, value in points]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
        base._entries.cache_clear()

    yield install
    base._entries.cache_clear()


def test_our_own_need_no_look_at_what_is_installed():
    """The list in the code is that of pyproject.toml."""
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["entry-points"][base.GROUP] == base.OWN


def test_the_built_in_targets_are_installed():
    found = available_targets()
    assert {"cpu", "reference"} <= set(found)
    assert "ropeway.compiler.targets.cpu.target:CpuTarget" in found["cpu"]


def test_the_log_names_the_target_its_origin_and_who_asked(caplog):
    with caplog.at_level(logging.INFO, logger="ropeway.targets"):
        activated = activate("cpu", "a test")
    assert activated.target.name == "cpu"
    assert caplog.messages == [f"target cpu activated: {activated.why}"]
    assert "a test asked for 'cpu'" in activated.why
    assert "CpuTarget from ropeway" in activated.why


def test_an_unknown_target_names_those_that_are_there():
    with pytest.raises(TargetError, match=r"no target 'gpu': installed are .*cpu, .*reference"):
        activate("gpu")


def test_a_vendors_target_is_found_and_its_device_imported_late(entries):
    entries(("vendor", "ropeway.compiler.targets.reference.target:ReferenceTarget"))
    target = activate("vendor").target
    assert device_class(target).__name__ == "ReferenceDevice"


def test_two_packages_with_one_name_are_refused(entries):
    entries(("vendor", "a:B"), ("vendor", "c:D"))
    for look in (lambda: activate("vendor"), available_targets):
        with pytest.raises(TargetError, match=r"'vendor' is provided twice, by a:B .* and c:D"):
            look()


def test_our_own_targets_are_those_of_the_entry_points_and_need_no_look_at_them(entries):
    installed = importlib.metadata.entry_points(group=base.GROUP)
    own = {point.name: point.value for point in installed if point.dist.name == "ropeway"}
    assert own == base.OWN
    entries(("cpu", "a:B"), ("cpu", "c:D"))
    assert type(activate("cpu").target).__name__ == "CpuTarget"


def test_a_target_that_does_not_import_is_named(entries):
    entries(("broken", "ropeway_no_such_module:Target"))
    with pytest.raises(TargetError, match="'broken' from ropeway_no_such_module:Target"):
        activate("broken")


def test_a_device_that_does_not_import_is_named():
    class Odd:
        name = "odd"
        device = "ropeway.runtime.devices.odd:Device"

    with pytest.raises(TargetError, match=r"'odd' names device 'ropeway.runtime.devices.odd"):
        device_class(Odd())  # type: ignore[arg-type]

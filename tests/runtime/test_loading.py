"""Loading an engine: which of several faults is told, and what isn't imported or left behind."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.cpu_programs import FAST, compile_decoder

from ropeway.compiler.errors import ArtifactError, RunError
from ropeway.runtime import selfcheck
from ropeway.runtime.loader import EngineOptions, load_engine

NO_TOKENIZER = {"tokenizer.json": b"{}", "settings.json": b"{}"}
ODD_SETTINGS = {"tokenizer.json": b"{}", "settings.json": b'{"odd": 1}'}
ONE_THREAD = EngineOptions(num_threads=1)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A program whose tokenizer can't be parsed."""
    path = tmp_path / "a.rope"
    compile_decoder(FAST).write(path, tokenizer_files=NO_TOKENIZER)
    return path


def test_a_tokenizer_that_cannot_be_parsed_fails_loading(damaged: Path) -> None:
    before = threading.active_count()
    with pytest.raises(ArtifactError, match=r"tokenizer.json can't be read: "):
        load_engine(damaged, ONE_THREAD)
    assert threading.active_count() == before


def test_settings_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.rope"
    compile_decoder(FAST).write(path, tokenizer_files=ODD_SETTINGS)
    with pytest.raises(ArtifactError, match=r"a.rope/tokenizer/settings.json: .*odd"):
        load_engine(path, ONE_THREAD)


def test_damaged_weights_are_told_before_a_damaged_tokenizer(damaged: Path) -> None:
    weights = damaged / "weights/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ArtifactError, match="checksum is"):
        load_engine(damaged, ONE_THREAD)


def test_a_failed_self_check_is_told_before_a_damaged_tokenizer(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfcheck._Wave, "_suspect", lambda wave: wave._jobs[0])
    with pytest.raises(RunError, match="self-check of bucket"):
        load_engine(damaged, ONE_THREAD)


# Each of them takes 1 to 500 ms to import, and serving an artifact needs none of them.
HEAVY = {
    "asyncio",
    "csv",
    "email",
    "http",
    "importlib.metadata",
    "importlib.resources",
    "jinja2",
    "json",
    "multiprocessing",
    "numpy.random",
    "rich",
    "ropeway.compiler.artifact.staging",
    "ropeway.compiler.artifact.writer",
    "ropeway.compiler.driver",
    "ropeway.compiler.frontend",
    "ropeway.compiler.ir",
    "ropeway.compiler.ops",
    "ropeway.compiler.pipeline",
    "ropeway.models",
    "ropeway.passes",
    "safetensors",
    "shutil",
    "socket",
    "subprocess",
    "sympy",
    "tempfile",
    "tokenizers",
    "torch",
    "transformers",
    "typer",
    "zipfile",
}


def test_importing_llm_imports_nothing_heavy() -> None:
    code = "import sys; from ropeway import LLM, SamplingParams; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert HEAVY & set(done.stdout.split()) == set()

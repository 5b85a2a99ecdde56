"""The command as a process: help, version, mistakes; one line and the right exit code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import PROGRAM, ropeway

from ropeway.compiler.cli.invocation import suggest
from ropeway.compiler.cli.progress import _logger
from ropeway.compiler.version import VERSION

COMMANDS = ("compile", "inspect", "generate", "chat", "serve", "opt", "bench", "bench serve")


def refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> None:
    assert done.returncode == code
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_version() -> None:
    done = ropeway("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"ropeway {VERSION}\n", "")


def test_help_lists_every_command() -> None:
    for arguments in (["--help"], ["-h"], []):
        done = ropeway(*arguments)
        assert done.returncode == 0
        lines = done.stdout.split("Commands:")[1].strip().split("\n")
        assert [re.split(r"\s{2,}", line.strip())[0] for line in lines] == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    words = command.split()
    done = ropeway(*words, "-h")
    assert done.returncode == 0, done.stderr
    assert re.search(rf"Example:\s+ropeway {command} ", done.stdout)
    assert done.stdout == ropeway(*words, "--help").stdout


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys; from ropeway.compiler.cli.main import main; main(['--help']); "
        "heavy = {'torch', 'sympy', 'numpy', 'transformers', 'tokenizers'} & sys.modules.keys(); "
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_misspelt_command_and_option() -> None:
    refused(ropeway("comple"), "ropeway: error: No such command 'comple'", "'compile'", "--help")
    refused(ropeway("inspect", "--verfy", "x"), "ropeway inspect: error: No such option", "--verfy")
    refused(ropeway("inspect"), "Missing argument", "`ropeway inspect --help`")
    refused(ropeway("generate", "a", "b", "--max-tokens", "many"), "--max-tokens", "integer")


def test_missing_artifact(tmp_path: Path) -> None:
    for command in ("inspect", "chat"):
        refused(ropeway(command, tmp_path / "none.rope"), "none.rope", "ropeway compile MODEL")
    refused(ropeway("generate", tmp_path / "none.rope", "hi"), "none.rope")


def test_missing_model(tmp_path: Path) -> None:
    done = ropeway("compile", tmp_path / "none.gguf", "-o", tmp_path / "m.rope")
    refused(done, "none.gguf")
    assert list(tmp_path.iterdir()) == []


def test_the_working_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(ropeway("compile", ".", "-o", "m.rope"), "./config.json is missing")
    refused(ropeway("generate", ".", "hi"), "error: .: this directory isn't an artifact")


def test_a_checkpoint_instead_of_an_artifact(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for command in (("generate", tmp_path / "m.gguf", "hi"), ("chat", tmp_path / "m.gguf")):
        refused(ropeway(*command), f"ropeway compile {tmp_path}/m.gguf -o m.rope")


def test_output_that_is_something_else(tmp_path: Path) -> None:
    """Refused at once, before any work."""
    (tmp_path / "m.rope").write_text("years of work")
    done = ropeway("compile", "whatever.gguf", "-o", tmp_path / "m.rope")
    refused(done, "m.rope", "isn't an artifact")
    assert (tmp_path / "m.rope").read_text() == "years of work"


def test_suggestions_name_the_program_as_it_can_be_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = tmp_path / "bin/ropeway"
    called.parent.mkdir()
    called.write_text("#!/bin/sh\n")
    called.chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(called)])
    monkeypatch.setenv("PATH", "/nowhere")
    assert suggest("chat", "my model.rope") == f"{called} chat 'my model.rope'"
    monkeypatch.setenv("PATH", str(called.parent))
    assert suggest("chat", "m.rope") == "ropeway chat m.rope"
    monkeypatch.setattr("sys.argv", ["-c"])
    assert suggest("chat", "m.rope") == "ropeway chat m.rope"


def test_a_log_gets_a_line_a_stage_of_a_long_run(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    update = _logger(lambda: now)
    for now, stage in ((1, "reading"), (9, "passes"), (12, "lowering"), (15, "lowering")):  # noqa: B007
        update(stage, 0, 1)
    now = 20
    update("writing", 0, 2)
    update("writing", 1, 2)
    captured = capsys.readouterr()
    assert captured.err == "lowering, after 12 s\nwriting, after 20 s\n"
    assert captured.out == ""


def test_bad_values(tmp_path: Path) -> None:
    out = tmp_path / "m.rope"
    refused(ropeway("compile", "m.gguf", "-o", out, "--dtype", "int3"), "int3", "bfloat16")
    refused(ropeway("compile", "m.gguf", "-o", out, "--max-model-len", "0"), "max_model_len")


CORPUS = Path(__file__).parents[1] / "artifact" / "corpus" / "format-1.rope"


def _shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("command", ["generate CORPUS hi --max-tokens 3", "inspect CORPUS"])
def test_a_full_disk_behind_stdout_is_one_line(command: str) -> None:
    line = f"{PROGRAM} {command.replace('CORPUS', str(CORPUS))}"
    done = _shell(f"{line} > /dev/full")
    assert done.returncode == 1
    assert done.stderr.count("\n") <= 2 and "Traceback" not in done.stderr
    assert "No space left" in done.stderr


def test_a_closed_stdout_is_one_line() -> None:
    done = _shell(f"{PROGRAM} inspect {CORPUS} >&-")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "standard output" in done.stderr


def test_an_ascii_terminal_gets_escapes_instead_of_a_traceback() -> None:
    done = _shell(f"{PROGRAM} generate {CORPUS} hé --max-tokens 8", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr

"""What a user installs works from anywhere: the wheel in a clean environment, with and without g++.

The sdist is built first and the wheels from it, so a file missing from either is missing here.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "artifact" / "corpus"
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def checked(*command: str | Path, cwd: Path, **env: str) -> str:
    done = run(*command, cwd=cwd, **env)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist, built from a copy of what git would commit."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    base = tmp_path_factory.mktemp("source")
    copy = base / "copy"
    names = checked("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in names.splitlines():
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    checked(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", base, cwd=copy)
    (archive,) = base.glob("*.tar.gz")
    shutil.unpack_archive(archive, base / "unpacked", filter="data")
    (unpacked,) = (base / "unpacked").iterdir()
    return unpacked


def build_wheel(source: Path, into: Path, **env: str) -> Path:
    copy = into / "build"
    shutil.copytree(source, copy)
    options = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(into), str(copy))
    checked(sys.executable, *PIP, *options, cwd=into, **env)
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has nothing but the wheel and its dependencies."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home / "venv", with_pip=True)
    python = home / "venv" / "bin" / "python"
    checked(python, *PIP, "install", str(wheel), cwd=home)
    return python.parent


def test_wheel_holds_every_module_and_the_kernels(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for tree in ("compiler", "models", "passes", "runtime", "serving"):
        for path in (ROOT / tree).rglob("*.py"):
            inside = path.relative_to(ROOT).as_posix()
            if inside == "compiler/_facade/__init__.py":
                inside = "__init__.py"
            assert f"ropeway/{inside}" in names
    assert any(name.startswith("ropeway/runtime/_kernels") for name in names)


def test_clean_install_has_no_compiler_library(clean: Path, tmp_path: Path) -> None:
    for module in ("torch", "sympy", "transformers", "gguf"):
        done = run(clean / "python", "-c", f"import {module}", cwd=tmp_path)
        assert done.returncode != 0, f"{module} came along"


def test_clean_install_generates_from_a_cpu_artifact(clean: Path, tmp_path: Path) -> None:
    """From another folder, without torch: the ids that the corpus promises."""
    expected = json.loads((CORPUS / "format-1.json").read_text())
    code = """
import json, sys, ropeway
llm = ropeway.LLM(sys.argv[1], num_threads=1)
params = ropeway.SamplingParams(temperature=0, max_tokens=int(sys.argv[3]), ignore_eos=True)
outputs = llm.generate(json.loads(sys.argv[2]), params)
print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""
    prompts = [case["prompt"] for case in expected["cases"]]
    printed = checked(
        clean / "python",
        "-c",
        code,
        CORPUS / "format-1.rope",
        json.dumps(prompts),
        str(len(expected["cases"][0]["tokens"])),
        cwd=tmp_path,
    )
    assert json.loads(printed) == [case["tokens"] for case in expected["cases"]]


@pytest.mark.parametrize(
    ("command", "module"),
    [(("compile", "model.gguf", "-o", "m.rope"), "torch"), (("opt", "step.ir"), "sympy")],
)
def test_clean_install_names_the_extra(
    clean: Path, tmp_path: Path, command: tuple[str, ...], module: str
) -> None:
    done = run(clean / "ropeway", *command, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "pip install 'ropeway[compile]'" in done.stderr
    assert f"'{module}'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_clean_install_has_the_command(clean: Path, tmp_path: Path) -> None:
    assert checked(clean / "ropeway", "--version", cwd=tmp_path).startswith("ropeway ")
    text = checked(clean / "ropeway", "inspect", CORPUS / "format-1.rope", cwd=tmp_path)
    assert "KV bytes per token" in text


def test_without_a_compiler(source: Path, tmp_path: Path) -> None:
    """The install goes through; target cpu says what is missing, target reference is there."""
    wheel = build_wheel(source, tmp_path, CC="/bin/false", CXX="/bin/false")
    with zipfile.ZipFile(wheel) as archive:
        assert not any(name.endswith(".so") for name in archive.namelist())
    site = tmp_path / "site"
    checked(
        sys.executable, *PIP, "install", "--no-deps", "--target", site, str(wheel), cwd=tmp_path
    )
    code = "import ropeway, sys; print(ropeway.__file__); ropeway.LLM(sys.argv[1])"
    done = run(
        sys.executable, "-c", code, CORPUS / "format-1.rope", cwd=tmp_path, PYTHONPATH=str(site)
    )
    assert str(site) in done.stdout
    assert "TargetError" in done.stderr
    message = done.stderr.strip().splitlines()[-1]
    assert "C++17" in message
    assert "reference" in message

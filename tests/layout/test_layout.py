"""The repository keeps its shape: packages, file sizes, names, imports, nothing of one machine."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from ropeway.compiler.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
TREES = ("compiler", "models", "passes", "runtime", "serving")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
LINES = 500
# Longer files, each with the reason; the list should shrink.
LONG: dict[str, str] = {}
FORBIDDEN_NAMES = re.compile(r"^(utils?|commons?|helpers?|misc)(_|\.|$)|_(utils?|helpers?)\.")
CODE = (".py", ".cpp", ".h")


def tracked() -> list[Path]:
    """Files that git knows or would take; all files where this isn't a git checkout."""
    git = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if git.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in git.stdout.splitlines() if (ROOT / name).is_file()]


def folder_of(package: str) -> Path:
    """Where a package's files are, by the mapping of pyproject.toml."""
    mapping = SETUPTOOLS["package-dir"]
    parts = package.split(".")
    for length in range(len(parts), 0, -1):
        base = mapping.get(".".join(parts[:length]))
        if base is not None:
            return ROOT.joinpath(base, *parts[length:])
    raise AssertionError(f"{package} is under no mapped package")


def test_every_folder_with_python_is_a_listed_package() -> None:
    """A folder missing from the list works in an editable install and not in a wheel."""
    folders = {path.parent for tree in TREES for path in (ROOT / tree).rglob("*.py")}
    listed = {folder_of(package) for package in SETUPTOOLS["packages"]}
    assert folders == listed


def test_packages_are_listed_once_and_sorted() -> None:
    packages = SETUPTOOLS["packages"]
    assert packages == sorted(set(packages))


@pytest.mark.parametrize("package", SETUPTOOLS["packages"])
def test_every_package_says_what_it_is(package: str) -> None:
    source = (folder_of(package) / "__init__.py").read_text()
    assert ast.get_docstring(ast.parse(source)), package


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for tree in TREES
        for path in (ROOT / tree).rglob("*.py")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_version_is_the_same_everywhere() -> None:
    assert PYPROJECT["project"]["version"] == VERSION


def test_torch_is_pinned_once() -> None:
    pins = set(re.findall(r"torch==[\d.]+", (ROOT / "pyproject.toml").read_text()))
    assert len(pins) == 1
    assert f"TORCH := {pins.pop()}\n" in (ROOT / "Makefile").read_text()


def test_long_files_are_listed() -> None:
    long = {
        str(path.relative_to(ROOT))
        for path in tracked()
        if path.suffix in CODE and len(path.read_text().splitlines()) > LINES
    }
    assert long == set(LONG), "split the file, or list it with the reason"


def test_names_say_something() -> None:
    vague = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if any(FORBIDDEN_NAMES.search(part) for part in path.relative_to(ROOT).parts)
    ]
    assert vague == []


def test_no_bare_imports_of_the_trees() -> None:
    """`import models` works by accident from the repository's root, and nowhere else."""
    bare = []
    for path in tracked():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            if any(name.split(".")[0] in TREES for name in names):
                bare.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert bare == []


def test_nothing_of_one_machine_is_written_down() -> None:
    """No absolute home or work folder, no registry host."""
    machine = re.compile(r"/(?:home|root|work|Users)/\w|(?:pypi|pythonhosted|pytorch)\.org\b")
    found = []
    for path in tracked():
        if path.suffix in (".gguf", ".safetensors", ".png") or path == Path(__file__).resolve():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}"
            for number, line in enumerate(text.splitlines(), 1)
            if machine.search(line)
        ]
    assert found == []


def test_link_tree_of_the_static_tools_covers_every_tree() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert f"PACKAGES := {' '.join(TREES)}\n" in makefile

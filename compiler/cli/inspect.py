"""`ropeway inspect`: what an artifact holds, what was fused and what wasn't, what it needs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ropeway.compiler.artifact.manifest import encode
from ropeway.compiler.artifact.reader import open_artifact
from ropeway.compiler.driver.explain import size
from ropeway.compiler.driver.program import Program
from ropeway.compiler.errors import InputError
from ropeway.runtime.checksum import fastest_word_sum


def inspect(
    artifact: Annotated[Path, typer.Argument(help="An artifact (NAME.rope).")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The manifest as JSON instead.")] = False,
    ir: Annotated[bool, typer.Option("--ir", help="The program as IR text instead.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Memory of every bucket.")] = False,
    verify: Annotated[str, typer.Option(help="fast, or full: weights by sha256 too.")] = "fast",
) -> None:
    """Show what was fused where, what was not and why, memory, and how many sequences fit.

    The whole artifact is checked first.

    Example: ropeway inspect smollm2.rope --verify full
    """
    if verify not in ("fast", "full"):
        raise InputError(f"--verify: {verify!r} isn't fast or full")
    if as_json and ir:
        raise InputError("--json and --ir: give one of the two")
    opened = open_artifact(artifact, "full" if verify == "full" else "fast", fastest_word_sum())
    if as_json:
        text = encode(opened.manifest).decode()
    elif ir:
        text = opened.read(opened.function.ir).decode()
    else:
        budget = _cache_budget()
        text = Program.of(opened).explain(budget, every_bucket=memory)
        if budget is not None:
            text += (
                f"\n  ({size(budget)}: an eighth of the memory that is available here, which LLM "
                f"takes at most unless it is given kv_cache_memory)"
            )
    sys.stdout.write(text.rstrip("\n") + "\n")


def _cache_budget() -> int | None:
    """What an LLM would take for KV blocks here and now: 1/8 of the available memory."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024 // 8
    except (OSError, ValueError, IndexError):
        pass
    return None

"""`ropeway compile`: a model in, an artifact out."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from ropeway.compiler.artifact.writer import check_replaceable
from ropeway.compiler.cli.invocation import suggest
from ropeway.compiler.cli.progress import progress_bar
from ropeway.compiler.driver.compile import compile_model as run_compiler
from ropeway.compiler.driver.explain import size
from ropeway.compiler.driver.options import MAX_NUM_BATCHED_TOKENS, check_options
from ropeway.compiler.driver.program import Program


def compile_model(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face directory, a .gguf file, or a name on a hub.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The artifact to write.")],
    *,
    target: Annotated[str, typer.Option(help="cpu or reference.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest sequence in tokens; default: the model's own.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Most tokens in one step, over all requests.")
    ] = MAX_NUM_BATCHED_TOKENS,
    pipeline: Annotated[
        str | None, typer.Option(help="Passes to run instead of the default ones, as a spec.")
    ] = None,
    strict_fusion: Annotated[
        bool, typer.Option("--strict-fusion", help="A fusion that matches nothing is an error.")
    ] = False,
) -> None:
    """Compile a model into an artifact, a directory that `ropeway chat` and LLM load.

    Example: ropeway compile SmolLM2-135M-Instruct.Q4_1.gguf -o smollm2.rope --dtype bfloat16
    """
    started = time.monotonic()
    options = check_options(target, dtype, max_model_len, None, max_num_batched_tokens)
    check_replaceable(output)  # better now than after the work
    with progress_bar() as progress:
        program = run_compiler(
            model, options, pipeline, strict_fusion=strict_fusion, progress=progress
        )
        program.save(output, lambda done, total: progress("writing weights", done, total))
    files = program.metadata.files
    total = sum(entry.size for entry in files.values())
    elapsed = time.monotonic() - started
    print(f"{output}: {size(total)} in {elapsed:.1f} s; {_next(program, output)}", file=sys.stderr)


def _next(program: Program, output: Path) -> str:
    """What to do with a program that can do no more than its checkpoint brought."""
    settings = program.tokenizer
    if settings is None:
        return (
            "no tokenizer came with the model, so it takes and gives token ids (ropeway.LLM); "
            f"next: {suggest('inspect', output)}"
        )
    if settings.chat_template is None:
        return f"no chat template; next: {suggest('generate', output, 'Once upon a time')}"
    return f"next: {suggest('chat', output)}"

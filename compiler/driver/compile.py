"""`ropeway.compile`: a model in, a program out. The whole way on one page.

    import_model -> pipeline of passes -> lowering passes -> target.lower -> Program

Weights stay expressions over the checkpoint until the program is saved.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Union

from ropeway.compiler.config import Bucket
from ropeway.compiler.driver.options import (
    MAX_NUM_BATCHED_TOKENS,
    CompileOptions,
    Progress,
    check_options,
    silent,
)
from ropeway.compiler.driver.program import Program
from ropeway.compiler.errors import InputError
from ropeway.compiler.extras import require
from ropeway.compiler.pipeline.report import Report
from ropeway.compiler.targets.base import activate

if TYPE_CHECKING:
    from torch import nn

    from ropeway.compiler.pipeline.pipeline import Pipeline

Model = Union[str, "os.PathLike[str]", "nn.Module"]
_STAGES = ("reading the model", "running passes", "lowering")


def compile(  # the name users know
    model: Model,
    *,
    target: str = "cpu",
    dtype: object = "bfloat16",
    max_model_len: int | None = None,
    buckets: Sequence[Bucket] | None = None,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
    pipeline: "Pipeline | str | None" = None,
) -> Program:
    """Compile a causal language model into a program for `target`.

    `model` is a Hugging Face directory, a `.gguf` file, a name on a hub (where a network exists) or
    an `nn.Module` whose attention is SDPA. `dtype` ("bfloat16" or "float32") is that of weights,
    activations and KV cache. `max_model_len` is the longest sequence in tokens, None for what the
    model was made for. `buckets` are the step sizes to emit graphs for, up to
    `max_num_batched_tokens` tokens. `pipeline` replaces the default passes (or their spec string).

    Raises an InputError with one line that says what is wrong, where, and what to do: for a
    damaged checkpoint, an op or structure that isn't known, or a program that the target can't run.
    """
    options = check_options(target, dtype, max_model_len, buckets, max_num_batched_tokens)
    return compile_model(model, options, pipeline)


def compile_model(
    model: Model,
    options: CompileOptions,
    pipeline: "Pipeline | str | None" = None,
    *,
    strict_fusion: bool = False,
    progress: Progress = silent,
) -> Program:
    """`compile` with checked options, for callers that show progress or want strict fusion.

    With `strict_fusion` a fusion of the pipeline that matches nothing raises PipelineError.
    """
    target = activate(options.target, "compile").target
    require("compiling", "torch", "sympy")
    from ropeway.compiler.driver.contents import Origin, build_contents  # noqa: PLC0415
    from ropeway.compiler.driver.import_model import import_model  # noqa: PLC0415
    from ropeway.passes.lowering import lowering_pipeline  # noqa: PLC0415

    progress(_STAGES[0], 0, len(_STAGES))
    imported = import_model(model, dtype=options.dtype, max_model_len=options.max_model_len)
    progress(_STAGES[1], 1, len(_STAGES))
    module, fused = _choose(pipeline).run(imported.module, strict_fusion=strict_fusion)
    progress(_STAGES[2], 2, len(_STAGES))
    module, lowered = lowering_pipeline(target).run(module)
    payload = target.lower(module, options.buckets)
    report = Report(f"{fused.spec},{lowered.spec}", fused.passes + lowered.passes)
    origin = Origin(
        source=imported.source,
        constants=imported.constants,
        name=imported.name,
        architecture=imported.architecture,
        vocab_size=imported.vocab_size,
        max_model_len=imported.max_model_len,
        command=_command(model, options, pipeline, imported.architecture),
        tokenizer_files=imported.tokenizer.files() if imported.tokenizer else {},
    )
    contents = build_contents(module, payload, report, options, origin)
    progress(_STAGES[2], 3, len(_STAGES))
    return Program(contents)


def _choose(pipeline: "Pipeline | str | None") -> "Pipeline":
    from ropeway.compiler.pipeline.pipeline import Pipeline  # noqa: PLC0415
    from ropeway.passes import CATALOGUE, GIVEN, default_pipeline  # noqa: PLC0415

    if pipeline is None:
        return default_pipeline()
    if isinstance(pipeline, str):
        return Pipeline.parse(pipeline, CATALOGUE, given=GIVEN)
    if not isinstance(pipeline, Pipeline):
        raise InputError(f"pipeline: {pipeline!r} is neither a Pipeline nor a spec string")
    return pipeline


def _command(
    model: Model, options: CompileOptions, pipeline: "Pipeline | str | None", architecture: str
) -> str:
    """How to make the artifact again, under a name of one's own: on the command line, where that
    can name the model, else in Python."""
    given: dict[str, object] = {"target": options.target, "dtype": options.dtype}
    if options.max_model_len is not None:
        given["max_model_len"] = options.max_model_len
    if options.max_num_batched_tokens != MAX_NUM_BATCHED_TOKENS:
        given["max_num_batched_tokens"] = options.max_num_batched_tokens
    if pipeline is not None:
        given["pipeline"] = pipeline if isinstance(pipeline, str) else pipeline.spec
    if not isinstance(model, str | os.PathLike):
        arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"ropeway.compile({architecture}(...), {arguments}).save('NAME.rope')"
    # The file's name alone: an artifact shouldn't tell where its maker keeps things.
    name = Path(model).resolve().name if Path(model).exists() else os.fspath(model)
    flags = [w for k, v in given.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    return shlex.join(["ropeway", "compile", name, "-o", "NAME.rope", *flags])

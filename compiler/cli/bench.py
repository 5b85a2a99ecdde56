"""`ropeway bench`: the suite on one artifact, held against what the machine can do."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ropeway.compiler.errors import InputError
from ropeway.runtime.bench.cost import model_cost
from ropeway.runtime.bench.machine import Ceilings
from ropeway.runtime.bench.quiet import Sampler, process_age
from ropeway.runtime.bench.suite import Bounds, fractions, run_suite
from ropeway.runtime.bench.workload import make_workload, read_workload
from ropeway.runtime.llm import LLM
from ropeway.runtime.sampling.params import SamplingParams


def bench(
    artifact: Annotated[Path, typer.Argument(help="A compiled artifact (NAME.rope).")],
    workload: Annotated[
        Path | None, typer.Option(help="Workload file; without one the built-in is drawn.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads; default: all cores.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples a figure.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Measure speed on a fixed workload, and what fraction of the machine's bound it reaches.

    Prefix caching is off; nothing is reused between samples. Progress goes to stderr. A sample in
    which other processes computed is taken again, and a busy machine is waited for, two minutes in
    all; `others_share_max` says how much they took of a core in the samples that were kept.

    Example: ropeway bench smollm2.rope --workload workload.json --threads 2 --json
    """
    llm = LLM(artifact, num_threads=threads, enable_prefix_caching=False)
    load_s = round(process_age(), 3)
    cost = model_cost(llm.artifact)
    work = read_workload(workload) if workload else make_workload(llm.vocab_size)
    if work.longest > llm.max_model_len:
        raise InputError(
            f"the workload has sequences of {work.longest} tokens, {artifact} holds "
            f"{llm.max_model_len}: give a shorter --workload FILE, or compile with a larger "
            f"--max-model-len"
        )

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    sampler = Sampler(samples, _note)
    result: dict[str, Any] = {"engine": "ropeway", "artifact": artifact.name, "load_s": load_s}
    ceilings = Ceilings(llm.num_threads)
    result |= run_suite(generate, work, sampler, ceilings, _note)
    before = llm.stats()
    generate(work.batch32, work.gen)
    after = llm.stats()
    host = after.host_seconds - before.host_seconds
    native = after.native_seconds - before.native_seconds
    result["host_fraction_b32"] = round(host / (host + native), 4)
    result["threads"] = llm.num_threads
    llm.close()
    result["read_gb_s"] = round(ceilings.read_gb_s, 2)
    result["gemm_bf16_gflop_s"] = round(ceilings.gemm_bf16_gflop_s, 1)
    result["gemm_by"] = ceilings.gemm_by
    result["bytes_per_token"] = cost.weight_bytes
    result["fraction"] = fractions(result, work, Bounds(cost, ceilings))
    print(json.dumps(result) if as_json else _table(result))


def _note(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr, flush=True)


def _table(result: dict[str, Any]) -> str:
    rows = []
    for key, value in result.items():
        if key == "agree":
            continue
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        rows.append(f"{key:22} {text}")
    return "\n".join(rows)

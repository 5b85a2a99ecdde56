"""`ropeway bench serve`: open-loop load on an OpenAI server, and how long people would wait."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ropeway.compiler.cli.progress import progress_bar
from ropeway.compiler.errors import InputError
from ropeway.serving.load.arrivals import parse_rates
from ropeway.serving.load.summary import parse_objectives
from ropeway.serving.load.sweep import Sweep
from ropeway.serving.load.table import print_table
from ropeway.serving.load.target import Target
from ropeway.serving.load.workload import (
    MARGIN,
    MOST_TOTAL,
    Synthetic,
    Written,
    read_workload,
    sharegpt_lengths,
)


def bench_serve(
    url: Annotated[str, typer.Argument(help="The server.")] = "http://127.0.0.1:8000",
    *,
    model: Annotated[str | None, typer.Option(help="Default: the first it names.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="/v1/chat/completions; default: /v1/completions.")
    ] = False,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token.")] = "",
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests at each rate.")] = 100,
    request_rate: Annotated[
        str, typer.Option(help="Requests a second; several, 1,2,4,inf, are run in turn.")
    ] = "inf",
    burstiness: Annotated[
        float,
        typer.Option(help="Of the intervals: 1 is Poisson, less comes in clumps, inf is constant."),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most open requests; others wait here.")
    ] = None,
    workload: Annotated[
        Path | None, typer.Option(help="JSONL file of requests; see below.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Fixed length; default: ShareGPT-like.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Fixed length; default: ShareGPT-like.")
    ] = None,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Prompts as token ids, by /tokenize: exact lengths.")
    ] = False,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help=f"Cuts lengths; default: what it says, or {MOST_TOTAL}."),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Answer in full length. OpenAI's own server doesn't know the field.",
        ),
    ] = True,
    extra_body: Annotated[
        str, typer.Option(metavar="JSON", help="More fields for every request.")
    ] = "{}",
    goodput: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:MS", help="Objectives, ttft, tpot or e2e: ttft:500,tpot:50."),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent before, one by one.")] = 2,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a request.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and arrivals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> int:
    """Put load on an OpenAI server and measure what its users would feel.

    Requests leave at random moments at a given rate and wait for nothing (open loop): a server that
    falls behind meets as many as before. How late this program itself was is measured too, as is
    the CPU that it took. Ctrl-C ends a run and prints what there is.

    TTFT runs from a request's departure to its first text, ITL between two pieces of text (one may
    hold several tokens), TPOT from first to last over the tokens but one, E2E to the end. Goodput
    counts the requests that meet every objective.

    Synthetic prompts are random words, of log-normal lengths that average 221 tokens, and 200 for
    the answers, like ShareGPT's. Each rate has prompts of its own, for the sake of prefix caches; a
    second call wants another --seed.

    A workload file holds one JSON object a line: `prompt` (text or token ids) or `messages`,
    `max_tokens` (128), `extra` (more fields), and `at`, its moment in seconds, on all lines or on
    none; with it the file dictates the schedule.

    Example: ropeway bench serve --request-rate 1,2,4,inf --goodput ttft:500,tpot:50

    Example: ropeway bench serve http://127.0.0.1:8000 --chat --max-concurrency 16 --json

    Example: ropeway bench serve --workload trace.jsonl
    """
    if not burstiness > 0:
        raise InputError(f"--burstiness {burstiness}: must be above 0: 1 is Poisson")
    if token_ids and (chat or workload is not None):
        raise InputError("--token-ids: only for synthetic prompts without --chat: leave it out")
    rates, objectives = parse_rates(request_rate), parse_objectives(goodput or [])
    fields = _fields(extra_body, ignore_eos)
    target = Target.parse(url, api_key)
    written = None if workload is None else _read(workload, chat, rates)
    if model is None or (written is None and max_model_len is None):
        named, said = target.first_model()
        model, max_model_len = model or named, max_model_len or said
    room = (max_model_len or MOST_TOTAL) - MARGIN
    sweep = Sweep(
        target=target,
        model=model,
        chat=chat,
        workload=written
        or Synthetic(
            _lengths(num_prompts, prompt_tokens, output_tokens, room, seed),
            seed,
            target.word_ids(model) if token_ids else None,
            chat,
        ),
        rates=rates,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        timeout=timeout,
        seed=seed,
        warmup=warmup,
        fields=fields,
        objectives=objectives,
    )
    with progress_bar() as update:
        summaries, interrupted = sweep.run(update)
    if as_json:
        told = {"url": target.address, "model": model, "runs": msgspec.to_builtins(summaries)}
        print(json.dumps(told))
    elif summaries:
        print_table(summaries)
    if interrupted:
        return 130
    return 0 if all(summary.completed for summary in summaries) else 1


def _read(path: Path, chat: bool, rates: list[float]) -> Written:
    written = read_workload(path, chat=chat)
    if written.lines[0].at is not None and rates != [math.inf]:
        raise InputError(f"--workload {path}: its `at` is the schedule: give no --request-rate")
    return written


def _lengths(
    count: int, prompt: int | None, output: int | None, room: int, seed: int
) -> list[tuple[int, int]]:
    """(prompt, output) tokens of each request; what isn't fixed is drawn and fits in `room`."""
    if prompt and output:
        return [(prompt, output)] * count
    drawn = sharegpt_lengths(count, room, seed)
    if prompt:
        return [(prompt, max(1, min(of_output, room - prompt))) for _, of_output in drawn]
    if output:
        return [(max(1, min(of_prompt, room - output)), output) for of_prompt, _ in drawn]
    return drawn


def _fields(extra_body: str, ignore_eos: bool) -> dict[str, Any]:
    try:
        extra = json.loads(extra_body)
    except ValueError as error:
        raise InputError(f"--extra-body: isn't JSON: {error}") from error
    if not isinstance(extra, dict):
        raise InputError('--extra-body: must be a JSON object, such as {"temperature": 0}')
    return {"temperature": 0, **({"ignore_eos": True} if ignore_eos else {}), **extra}

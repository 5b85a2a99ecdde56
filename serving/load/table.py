"""The figures for a person: a row a figure, a column a request rate."""

from collections.abc import Callable, Sequence

from ropeway.serving.load.summary import Spread, Summary

CACHED = 0.25  # of the prompts: beyond it their cost is mostly that of a run before
LATE = 20.0  # milliseconds: beyond it the schedule that was asked for isn't what the server met

_COUNTS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("completed", lambda one: f"{one.completed} of {one.requests}"),
    ("duration, s", lambda one: f"{one.duration_s:.2f}"),
    ("most open at once", lambda one: str(one.most_open)),
    ("prompt tokens", lambda one: f"{one.prompt_tokens}"),
    ("  of them cached", lambda one: f"{one.cached_tokens}"),
    ("output tokens", lambda one: f"{one.output_tokens}"),
)
_RATES: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("requests/s", lambda one: f"{one.requests_per_s:.2f}"),
    ("output tokens/s", lambda one: f"{one.output_tokens_per_s:.1f}"),
    ("total tokens/s", lambda one: f"{one.total_tokens_per_s:.1f}"),
)
_TIMES: tuple[tuple[str, Callable[[Summary], Spread | None]], ...] = (
    ("TTFT, ms", lambda one: one.ttft_ms),
    ("TPOT, ms", lambda one: one.tpot_ms),
    ("ITL, ms", lambda one: one.itl_ms),
    ("E2E, ms", lambda one: one.e2e_ms),
)
_SPREAD: tuple[tuple[str, Callable[[Spread], float]], ...] = (
    ("mean", lambda times: times.mean),
    ("p50", lambda times: times.p50),
    ("p90", lambda times: times.p90),
    ("p99", lambda times: times.p99),
)


def print_table(summaries: Sequence[Summary]) -> None:
    """Print the runs on stdout, errors and doubts below."""
    from rich.console import Console  # noqa: PLC0415  (0.1 s, and --json doesn't need it)
    from rich.table import Table  # noqa: PLC0415

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 40 + 20 * len(summaries)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("request rate")
    for summary in summaries:
        rate = summary.request_rate
        table.add_column(rate if isinstance(rate, str) else f"{rate:g}", justify="right")
    for rows in _sections(summaries):
        table.add_row()
        for name, *cells in rows:
            table.add_row(name, *cells)
    console.print(table)
    for summary in summaries:
        for line in _remarks(summary):
            console.print(line, markup=False, style="yellow", soft_wrap=True)


def _sections(summaries: Sequence[Summary]) -> list[list[list[str]]]:
    counts = [[name, *map(of, summaries)] for name, of in _COUNTS]
    rates = [[name, *map(of, summaries)] for name, of in _RATES]
    if any(summary.goodput for summary in summaries):
        rates.append(["goodput, requests/s", *map(_goodput, summaries)])
    times = [
        [f"{name}, {part}", *(_time(spread(one), of) for one in summaries)]
        for name, spread in _TIMES
        for part, of in _SPREAD
    ]
    client = [
        ["tokens a chunk", *(_number(one.tokens_per_chunk) for one in summaries)],
        ["client late, p99 ms", *(_time(one.lateness_ms, _SPREAD[3][1]) for one in summaries)],
        ["client CPU, cores", *(f"{one.client_cores:.2f}" for one in summaries)],
    ]
    if any(one.slot_wait_ms and one.slot_wait_ms.max > 1 for one in summaries):
        waits = (_time(one.slot_wait_ms, _SPREAD[1][1]) for one in summaries)
        client.insert(0, ["wait for a slot, p50 ms", *waits])
    return [counts, rates, times, client]


def _goodput(summary: Summary) -> str:
    good = summary.goodput
    return "-" if good is None else f"{good.requests_per_s:.2f} ({good.share:.0%})"


def _time(spread: Spread | None, of: Callable[[Spread], float]) -> str:
    return "-" if spread is None else _number(of(spread))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.{1 if value >= 100 else 2}f}"


def _remarks(summary: Summary) -> list[str]:
    """What a reader must know before believing the figures."""
    rate = summary.request_rate
    where = f"rate {rate if isinstance(rate, str) else format(rate, 'g')}"
    lines = [
        f"{where}: {count} failed: {kind}: {summary.error_examples[kind]}".rstrip(": ")
        for kind, count in summary.errors.items()
    ]
    if summary.interrupted:
        lines.append(f"{where}: interrupted with {summary.interrupted} open, which aren't counted")
    if summary.uncounted:
        lines.append(
            f"{where}: {summary.uncounted} answers came without usage: their chunks are counted as "
            "tokens"
        )
    if summary.cached_tokens > CACHED * summary.prompt_tokens:
        lines.append(
            f"{where}: {summary.cached_tokens} of {summary.prompt_tokens} prompt tokens were in "
            "the server's cache: another --seed draws prompts that it hasn't met"
        )
    if rate != "inf" and summary.lateness_ms and summary.lateness_ms.p99 > LATE:
        lines.append(
            f"{where}: this client was late by {summary.lateness_ms.p99:.0f} ms (p99): it has too "
            "little CPU, and the server met fewer requests at a time than asked for"
        )
    return lines

"""Where the time of a step goes, op by op, and how near each op is to what the machine can do.

The bound of an op is max(bytes / read rate, operations / GEMM rate), the rates being those measured
in the same run. What an op finds in a cache is counted all the same, so small activations can show
more bytes a second than memory gives, and a fraction above 1.
"""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ropeway.compiler.targets.cpu.plan import Step, Template
from ropeway.runtime.bench.capture import Capture
from ropeway.runtime.bench.machine import Ceilings
from ropeway.runtime.bench.plan_cost import StepSizes, Work, packed_matrix, plan_work

_NUMBER = re.compile(r"\d+")
_PLAIN_PARTS = ("weight", "model", "layers", "transformer", "h", "*")


class OpRow(msgspec.Struct, frozen=True):
    """All calls of one op in a step. Times in milliseconds, rates in 1e9 a second.

    `of_bound` is bound / time; None where no GEMM rate was measured.
    """

    op: str
    what: str
    rows: int
    calls: int
    ms: float
    share: float
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    flops: int
    gb_s: float
    gflop_s: float
    bound_ms: float | None
    of_bound: float | None


class StepProfile(msgspec.Struct, frozen=True):
    """A step's rows and sums; each time is the median of `steps` steps of a run, in milliseconds.

    `total` sums the rows. `noise_ms` is what the ops took beyond their medians, `gaps_ms` what lay
    between them, `wall_ms` the whole call with time stamps, `plain_ms` the same step without.
    `sample_ms` and `host_ms` lie between steps.
    """

    step: str
    bucket: str
    steps: int
    context: float
    ops: list[OpRow]
    total: OpRow
    noise_ms: float
    gaps_ms: float
    wall_ms: float
    plain_ms: float
    sample_ms: float
    host_ms: float


@dataclass(frozen=True)
class Rates:
    """The machine's ceilings in bytes and operations a second; 0 operations: not measured."""

    read: float
    compute: float

    @staticmethod
    def of(ceilings: Ceilings) -> "Rates":
        """The medians so far."""
        return Rates(ceilings.read_gb_s * 1e9, ceilings.gemm_bf16_gflop_s * 1e9)

    def bound(self, work: Work) -> float | None:
        """Seconds that `work` takes at least."""
        if not self.compute:
            return None
        return max(work.bytes / self.read, work.flops / self.compute)


@dataclass(frozen=True)
class _Label:
    """What makes two plan steps one row of the table."""

    op: str
    what: str
    rows: int


class _Call(NamedTuple):
    """One plan step: its work, its time and its bound in seconds."""

    work: Work
    nanoseconds: float
    bound: float | None


def label(template: Template, step: Step, sizes: StepSizes) -> _Label:
    """The IR op, what sets it apart (its matrix, its heads, its width) and its rows."""
    name = step.op.partition(" at ")[0]
    if step.kernel == "kv_write":
        name = f"{name}: write"
    return _Label(name, _what(template, step), sizes.count(step.rows))


def _what(template: Template, step: Step) -> str:
    matrix = packed_matrix(template, step)
    if matrix is not None:
        return f"{_short(matrix.name)} {matrix.shape[0]}x{matrix.shape[1]}"
    if "cache" in step.operands:
        slot_of = template.caches[step.operands["cache"].index]
        window = step.params.get("window")
        heads = f"{slot_of.heads}x{slot_of.key_dim}"
        if step.kernel == "attention":
            heads = f"{step.operands['q'].shape[0]}/{heads}"
        return f"{heads}{f' window {window}' if window else ''}"
    shown = step.operands.get("x") or step.operands.get("q") or step.operands.get("y")
    width = shown.width if shown else 0
    return f"{step.params['op']} {width}" if "op" in step.params else str(width)


def _short(weight: str) -> str:
    """`self_attn.qkv` of `model.layers.3.self_attn.qkv.weight`."""
    parts = [part for part in _NUMBER.sub("*", weight).split(".") if part not in _PLAIN_PARTS]
    return ".".join(parts[-2:]) or weight


def profile_step(template: Template, capture: Capture, rates: Rates) -> StepProfile:
    """The table of captured steps. Ops are in the order in which they first run."""
    steps = capture.steps
    middle = steps[len(steps) // 2]
    works = plan_work(template, middle.sizes)
    times = [statistics.median(one) for one in zip(*(s.kernels for s in steps), strict=True)]
    calls = [_Call(*one) for one in zip(works, times, map(rates.bound, works), strict=True)]
    grouped: dict[_Label, list[_Call]] = {}
    for step, call in zip(template.steps, calls, strict=True):
        grouped.setdefault(label(template, step, middle.sizes), []).append(call)
    total_ns, sizes = sum(times), middle.sizes
    return StepProfile(
        step=str(capture.shape),
        bucket=capture.bucket.name,
        steps=len(steps),
        context=round(sizes.context, 1),
        ops=[_row(key, group, total_ns) for key, group in grouped.items()],
        total=_row(_Label("sum of ops", "", sizes.tokens), calls, total_ns),
        noise_ms=statistics.median(sum(step.kernels) - total_ns for step in steps) / 1e6,
        gaps_ms=statistics.median(step.wall - sum(step.kernels) for step in steps) / 1e6,
        wall_ms=statistics.median(step.wall for step in steps) / 1e6,
        plain_ms=statistics.median(step.plain for step in steps) / 1e6,
        sample_ms=statistics.median(step.sample for step in steps) / 1e6,
        host_ms=capture.host / 1e6,
    )


def _row(key: _Label, calls: Sequence[_Call], total_ns: float) -> OpRow:
    work = sum((call.work for call in calls), Work())
    nanoseconds = sum(call.nanoseconds for call in calls)
    bounds = [call.bound for call in calls if call.bound is not None]
    bound = sum(bounds) if len(bounds) == len(calls) else None
    seconds = max(nanoseconds, 1) / 1e9  # a clock that stood still
    return OpRow(
        op=key.op,
        what=key.what,
        rows=key.rows,
        calls=len(calls),
        ms=nanoseconds / 1e6,
        share=nanoseconds / max(total_ns, 1),
        weight_bytes=work.weight_bytes,
        activation_bytes=work.activation_bytes,
        kv_bytes=work.kv_bytes,
        flops=work.flops,
        gb_s=work.bytes / seconds / 1e9,
        gflop_s=work.flops / seconds / 1e9,
        bound_ms=None if bound is None else bound * 1e3,
        of_bound=None if bound is None else bound / seconds,
    )


_HEAD: tuple[str, ...] = (
    "op",
    "what",
    "rows",
    "calls",
    "ms",
    "share",
    "weights",
    "activ.",
    "KV",
    "GFLOP",
)
_HEAD += ("GB/s", "GFLOP/s", "bound", "of bound")
_WIDTHS = (24, 28, 5, 5, 8, 6, 8, 8, 8, 8, 7, 8, 8, 8)


def table(found: StepProfile) -> str:
    """The profile as text; bytes in MB."""
    lines = [
        f"{found.step}, bucket {found.bucket}: median of {found.steps} steps of a run, "
        f"{found.context:g} tokens a request; ms, MB",
        _line(_HEAD),
    ]
    lines += [_line(_cells(row)) for row in found.ops]
    lines.append(_line(_cells(found.total)))
    sums = (
        ("ops beyond their medians (noise)", found.noise_ms),
        ("gaps between ops", found.gaps_ms),
        ("step, with time stamps", found.wall_ms),
        ("step, without", found.plain_ms),
        ("sampling", found.sample_ms),
        ("host work", found.host_ms),
    )
    space = sum(_WIDTHS[:4]) + 3
    lines += [f"{name:<{space}} {ms:{_WIDTHS[4]}.3f}" for name, ms in sums]
    return "\n".join(lines)


def _cells(row: OpRow) -> tuple[str, ...]:
    return (
        row.op.removeprefix("nn.").removeprefix("tensor."),
        row.what,
        str(row.rows),
        str(row.calls),
        f"{row.ms:.3f}",
        f"{100 * row.share:.1f}%",
        *(f"{size / 1e6:.2f}" for size in (row.weight_bytes, row.activation_bytes, row.kv_bytes)),
        f"{row.flops / 1e9:.3f}",
        f"{row.gb_s:.1f}",
        f"{row.gflop_s:.0f}",
        "-" if row.bound_ms is None else f"{row.bound_ms:.3f}",
        "-" if row.of_bound is None else f"{row.of_bound:.2f}",
    )


def _line(cells: tuple[str, ...]) -> str:
    texts = [
        f"{cell:<{width}}" if number < 2 else f"{cell:>{width}}"
        for number, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    ]
    return " ".join(texts).rstrip()

"""The table per op and the trace: bytes and operations against values worked out by hand and
against the cost rules of the IR's ops, sums against their parts."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.command import ropeway
from support.cpu_programs import FAST, compile_decoder

from ropeway.compiler.artifact.reader import open_artifact
from ropeway.compiler.cli.main import main
from ropeway.compiler.errors import InputError
from ropeway.compiler.ir.dims import substitute
from ropeway.compiler.ops import registry
from ropeway.compiler.targets.cpu.plan import (
    TEMPLATE_FILE,
    Ref,
    Step,
    Template,
    decode_template,
)
from ropeway.runtime.bench.capture import Capture, StepShape, capture, default_shapes
from ropeway.runtime.bench.cost import model_cost
from ropeway.runtime.bench.plan_cost import StepSizes, Work, plan_work
from ropeway.runtime.bench.roofline import OpRow, Rates, StepProfile, profile_step, table
from ropeway.runtime.bench.trace import trace
from ropeway.runtime.devices.base import StepInputs
from ropeway.runtime.engine_options import EngineOptions
from ropeway.runtime.loader import load_engine

RATES = Rates(read=1e9, compute=1e9)
SHAPES = ("decode:2@30", "prefill:48")  # both prompts of 24 fit one step of 64 tokens
# Weights of FAST, in elements.
QKV, OUT, GATE_UP, DOWN, HEAD = 128 * 64, 64 * 64, 192 * 64, 64 * 96, 80 * 64


@pytest.fixture(scope="module")
def template(tiny_program: Path) -> Template:
    return decode_template(open_artifact(tiny_program).read(TEMPLATE_FILE))


@pytest.fixture(scope="module")
def captures(tiny_program: Path) -> list[Capture]:
    engine = load_engine(tiny_program, EngineOptions(num_threads=1))
    try:
        return [capture(engine, StepShape.parse(text), 5) for text in SHAPES]
    finally:
        engine.close()


def rows_of(found: StepProfile, op: str) -> list[OpRow]:
    return [row for row in found.ops if row.op == op]


def test_captured_steps_are_those_that_were_wanted(captures: list[Capture]) -> None:
    decode, prefill = captures
    assert (decode.bucket.name, prefill.bucket.name) == ("decode-2", "mixed-64x4x4")
    for number, step in enumerate(decode.steps):
        assert (step.sizes.tokens, step.sizes.rows) == (2, 2)
        assert step.sizes.spans == ((27 + number, 28 + number),) * 2  # 30 in the middle
    for step in prefill.steps:
        assert step.sizes == StepSizes(48, 1, ((0, 48),), peaks=1)  # greedy
    for step in (*decode.steps, *prefill.steps):
        assert all(taken >= 0 for taken in step.kernels)
        assert sum(step.kernels) <= step.wall
        assert step.plain > 0
        assert step.sample > 0


def test_a_decode_step_costs_what_was_worked_out_by_hand(
    template: Template, captures: list[Capture]
) -> None:
    """2 requests of 30 tokens, float32."""
    found = profile_step(template, captures[0], RATES)
    [attention] = rows_of(found, "nn.paged_attention")
    assert attention.calls == 2
    # Each of 4 heads: 16 products and 16 sums a key for the score, the same for the value.
    assert attention.flops == 2 * 2 * 30 * 4 * (2 * 16 + 2 * 16)
    assert attention.kv_bytes == 2 * 2 * 30 * 2 * (16 + 16) * 4
    assert attention.activation_bytes == 2 * 2 * (64 + 64) * 4  # queries and result
    assert attention.weight_bytes == 0
    [write] = rows_of(found, "nn.paged_attention: write")
    assert (write.kv_bytes, write.flops) == (2 * 2 * 2 * (16 + 16) * 4, 0)
    [embedding] = rows_of(found, "nn.embedding")
    assert (embedding.weight_bytes, embedding.activation_bytes) == (2 * 64 * 4, 2 * 64 * 4)
    [down] = [row for row in found.ops if row.what.endswith("64x96")]
    assert down.calls == 2
    assert down.weight_bytes == 2 * DOWN * 4
    assert down.flops == 2 * 2 * 2 * DOWN
    assert down.activation_bytes == 2 * 2 * (96 + 64) * 4
    [gate_up] = [row for row in found.ops if row.what.endswith("192x64")]
    assert gate_up.flops == 2 * (2 * 2 * GATE_UP + 2 * 5 * 64)  # with the norm of 64 values
    assert gate_up.weight_bytes == 2 * (GATE_UP + 64) * 4  # with its gain
    [rope] = rows_of(found, "nn.rope_qk")
    assert (rope.flops, rope.weight_bytes) == (2 * 2 * 3 * 6 * 16, 2 * 2 * 16 * 4)


def test_a_prompt_keeps_only_the_wanted_row_at_the_end(
    template: Template, captures: list[Capture]
) -> None:
    found = profile_step(template, captures[1], RATES)
    [attention] = rows_of(found, "nn.paged_attention")
    assert attention.flops == 2 * (48 * 49 // 2) * 4 * 64  # key j is seen by queries j..47
    assert attention.kv_bytes == 2 * 48 * 2 * 32 * 4
    gate_ups = [row for row in found.ops if row.what.endswith("192x64")]
    assert [(row.rows, row.calls) for row in gate_ups] == [(48, 1), (1, 1)]
    [head] = [row for row in found.ops if row.what.endswith("80x64")]
    assert (head.rows, head.flops) == (1, 2 * HEAD + 5 * 64)
    # x, residual and their sum; a greedy draw leaves the logits unwritten.
    assert head.activation_bytes == 3 * 64 * 4


def test_logits_that_are_drawn_from_count_as_written(template: Template) -> None:
    for peaks, written in ((0, 3), (2, 1)):
        work = plan_work(template, StepSizes(3, 3, ((0, 1),) * 3, peaks))[-1]
        assert work.activation_bytes == (3 * 3 * 64 + written * 80) * 4


def test_vector_kernels_count_what_they_read_write_and_compute() -> None:
    """Hand-made steps of 8 values a row, for 3 tokens."""

    def ref(width: int, *shape: int) -> Ref:
        return Ref("arena", width, "bf16", shape or (width,), (1,) * max(1, len(shape)))

    x, half, whole = ref(8), ref(4), {"x": ref(8), "y": ref(8)}
    expected = [
        (Step("glu", "nn.glu at a.py:1", "tokens", {"x": x, "y": half}, {"act": "silu"}), 4, 12),
        (Step("unary", "nn.silu", "tokens", whole, {"op": "silu"}), 8, 16),
        (Step("unary", "tensor.cast", "tokens", whole, {"op": "copy"}), 0, 16),
        (Step("binary", "math.add", "tokens", {"a": x, "b": x, "y": x}, {"op": "add"}), 8, 24),
        (Step("reduce", "math.sum", "tokens", {"x": x, "y": ref(1)}, {"op": "sum"}), 8, 9),
        (Step("softmax", "nn.softmax", "tokens", whole), 4 * 8, 16),
        (Step("gather_rows", "tensor.gather_rows", "rows", whole), 0, 16),
        (Step("unheard_of", "nn.unheard_of", "tokens", whole), 0, 16),
    ]
    steps = [step for step, _, _ in expected]
    template = Template(1, 32, [], [], [], [], steps, ref(99), 64)
    works = plan_work(template, StepSizes(tokens=3, rows=1, spans=((0, 3),)))
    for (step, flops, values), work in zip(expected, works, strict=True):
        rows = 1 if step.rows == "rows" else 3
        assert work == Work(rows * flops, 0, rows * values * 2, 0), step.op


def test_gemm_weights_are_those_that_the_suite_counts(
    tiny_program: Path, template: Template, captures: list[Capture]
) -> None:
    works = plan_work(template, captures[0].steps[0].sizes)
    gemms = [
        (step, work)
        for step, work in zip(template.steps, works, strict=True)
        if step.kernel.startswith("gemm")
    ]
    gains = sum(64 * 4 for step, _ in gemms if "gain" in step.operands)
    weights = sum(work.weight_bytes for _, work in gemms)
    expected = 4 * (2 * (QKV + OUT + GATE_UP + DOWN) + HEAD)
    assert weights - gains == model_cost(open_artifact(tiny_program)).weight_bytes == expected


def test_operations_are_those_of_the_ops_cost_rules() -> None:
    """Every op of the lowered module but attention, whose rule is an upper bound."""
    compiled = compile_decoder(FAST)
    template = decode_template(compiled.payload.files[TEMPLATE_FILE])
    sizes = StepSizes(tokens=7, rows=3, spans=((0, 4), (5, 7), (8, 9)))
    dims = {"T": 7, "L": 3, "R": 3, "MB": 5}
    stated: Counter[str] = Counter()
    for op in compiled.module.fn.ops:
        if op.name != "nn.paged_attention":
            stated[op.name] += int(substitute(registry.cost(op).flops, dims))
    counted: Counter[str] = Counter()
    for step, work in zip(template.steps, plan_work(template, sizes), strict=True):
        name = step.op.partition(" at ")[0]
        if name != "nn.paged_attention":
            counted[name] += work.flops
    assert +counted == +stated
    assert counted["nn.add_rms_norm_linear"] > 0


@pytest.mark.parametrize(
    ("window", "pairs", "keys"),
    [(0, 15 + 6 + 7, 5 + 7), (3, 1 + 2 + 3 * 3 + 3 + 3, 5 + 4), (1, 5 + 2, 5 + 2)],
)
def test_what_a_window_lets_tokens_see(window: int, pairs: int, keys: int) -> None:
    """A prompt of 5 and two tokens after 5 others."""
    inputs = StepInputs(
        ids=np.zeros(7, np.int32), positions=np.array([0, 1, 2, 3, 4, 5, 6], np.int32), slots=[],
        block_tables=[], query_start=np.array([0, 5, 7], np.int32),
        lengths=np.array([5, 7], np.int32), rows=np.array([4, 6], np.int32),
    )  # fmt: skip
    sizes = StepSizes.of(inputs)
    assert sizes.spans == ((0, 5), (5, 7))
    assert sizes.seen(window) == (pairs, keys)


def test_rows_add_up(template: Template, captures: list[Capture]) -> None:
    for one in captures:
        found = profile_step(template, one, RATES)
        assert sum(row.calls for row in found.ops) == found.total.calls == len(template.steps)
        for field in ("ms", "share", "flops", "weight_bytes", "activation_bytes", "kv_bytes"):
            parts = sum(getattr(row, field) for row in found.ops)
            assert parts == pytest.approx(getattr(found.total, field)), field
        assert found.total.share == pytest.approx(1)
        assert found.total.bound_ms == pytest.approx(sum(row.bound_ms or 0 for row in found.ops))
        medians = np.median([step.kernels for step in one.steps], axis=0)
        assert found.total.ms == pytest.approx(medians.sum() / 1e6)
        gaps = [step.wall - sum(step.kernels) for step in one.steps]
        assert found.gaps_ms == pytest.approx(np.median(gaps) / 1e6)


def test_rates_and_bounds(template: Template, captures: list[Capture]) -> None:
    """At 1 GB/s a byte takes as long as an operation at 1 GFLOP/s: the larger number counts."""
    for row in profile_step(template, captures[1], RATES).ops:
        moved = row.weight_bytes + row.activation_bytes + row.kv_bytes
        assert row.bound_ms == pytest.approx(max(moved, row.flops) / 1e6)
        assert row.gb_s * row.ms == pytest.approx(moved / 1e6)
        assert row.gflop_s * row.ms == pytest.approx(row.flops / 1e6)
        assert row.of_bound == pytest.approx(row.bound_ms / row.ms)


def test_without_a_gemm_rate_there_are_no_bounds(
    template: Template, captures: list[Capture]
) -> None:
    found = profile_step(template, captures[0], Rates(1e9, 0.0))
    assert {row.of_bound for row in (*found.ops, found.total)} == {None}
    assert table(found).splitlines()[2].endswith("-        -")


def test_the_trace_holds_every_plan_step_in_order(
    template: Template, captures: list[Capture]
) -> None:
    found = json.loads(json.dumps(trace(template, captures)))
    events = found["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names[0] == "decode:2@30 (decode-2)"
    timed = [event for event in events if event["ph"] == "X"]
    assert len(events) == len(names) + len(timed)
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(timed))
    for pid, one in enumerate(captures, start=1):
        kernels = [event for event in timed if (event["pid"], event["tid"]) == (pid, 1)]
        assert [event["cat"] for event in kernels] == [s.kernel for s in template.steps] * 5
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in pairwise(kernels))
        durations = [taken / 1e3 for step in one.steps for taken in step.kernels]
        assert [event["dur"] for event in kernels] == pytest.approx(durations, abs=1e-3)
        steps = [event for event in timed if event["pid"] == pid and event["cat"] == "step"]
        assert [event["dur"] for event in steps] == pytest.approx([s.wall / 1e3 for s in one.steps])
        assert {key for event in kernels for key in event["args"]} >= {
            "op", "source", "rows", "bytes", "flops", "GB/s", "GFLOP/s",
        }  # fmt: skip
    attention = next(event for event in timed if event["cat"] == "attention")
    assert attention["args"]["flops"] == 2 * 28 * 4 * 64  # one layer
    assert attention["args"]["source"]


@pytest.mark.parametrize("text", ["", "decode", "decode:4", "prefill:0", "prefill:8@2", "x:1@2"])
def test_a_step_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="write decode:REQUESTS@CONTEXT or prefill:TOKENS"):
        StepShape.parse(text)


def test_steps_are_spelt_as_they_are_read() -> None:
    for text in ("decode:32@200", "prefill:1024"):
        assert str(StepShape.parse(text)) == text


def test_default_steps_that_a_program_is_too_small_for_are_left_out(tiny_program: Path) -> None:
    with pytest.raises(InputError, match="160 tokens, too few for decode:1@200"):
        default_shapes(open_artifact(tiny_program))


@pytest.mark.usefixtures("no_measuring")
def test_the_command_prints_a_table_or_json_and_writes_the_trace(
    tiny_program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "steps.json"
    options = ["--threads", "1", "--step", "decode:1@20", "--step", "prefill:9"]
    assert main(["bench", str(tiny_program), *options, "--trace", str(file)]) == 0
    shown = capsys.readouterr()
    assert "decode:1@20, bucket decode-1: median of 25 steps" in shown.out
    assert "prefill:9, bucket mixed-64x4x4: median of 9 steps" in shown.out
    for text in ("add_rms_norm_linear", "sum of ops", "gaps between ops", "host work"):
        assert shown.out.count(text) >= 2, text
    events = json.loads(file.read_text())["traceEvents"]
    assert sum(event.get("cat") == "step" for event in events) == 25 + 9
    assert main(["bench", str(tiny_program), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in found["profile"]] == ["decode:1@20", "prefill:9"]
    assert found["read_gb_s"] == 10.0
    assert "batch32_tok_s" not in found  # the suite wasn't asked for


def test_mistakes_are_one_line(tiny_program: Path, tmp_path: Path) -> None:
    for arguments, word in [
        ((), "no artifact given"),
        ((tiny_program, "--step", "decode"), "decode:REQUESTS@CONTEXT"),
        ((tiny_program, "--step", "decode:5@20"), "a step holds 4 requests"),
        ((tiny_program, "--step", "prefill:65"), "a step holds 64 prompt tokens"),
        ((tiny_program, "--step", "decode:1@160"), "sequences of 160 tokens"),
        ((tiny_program, "--profile"), "too few for decode:1@200"),
        ((tiny_program, "--trace", tmp_path / "no" / "file"), "there is no folder"),
        ((tiny_program, "--trace", tmp_path), "is a folder"),
    ]:
        done = ropeway("bench", *arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert word in done.stderr

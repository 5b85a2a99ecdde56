"""The arena: no two buffers share a byte while both are alive, checked by brute force."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.cpu_programs import BUCKETS, FAST, compile_decoder

from ropeway.compiler.config import Bucket
from ropeway.compiler.targets.cpu.lower import lower_template
from ropeway.compiler.targets.cpu.memory import Lifetimes, lifetimes, place, plan_bucket
from ropeway.compiler.targets.cpu.plan import (
    BucketPlan,
    Template,
    decode_bucket,
    decode_template,
)

SPANS = st.tuples(st.integers(0, 12), st.integers(0, 6)).map(lambda s: (s[0], s[0] + s[1]))


def brute_conflicts(spans: list[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    def meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return bool(set(range(a[0], a[1] + 1)) & set(range(b[0], b[1] + 1)))

    return tuple(
        tuple(j for j, b in enumerate(spans) if j != i and meet(a, b)) for i, a in enumerate(spans)
    )


@given(st.lists(st.tuples(SPANS, st.integers(0, 9).map(lambda n: 64 * n)), max_size=14))
def test_placed_buffers_never_overlap_while_alive(buffers):
    spans = [span for span, _ in buffers]
    sizes = [size for _, size in buffers]
    alive = Lifetimes(tuple(spans), brute_conflicts(spans))
    offsets, total = place(sizes, alive)
    for time in range(20):
        owners: dict[int, int] = {}
        for buffer, (start, end) in enumerate(spans):
            if not start <= time <= end:
                continue
            for unit in range(offsets[buffer], offsets[buffer] + sizes[buffer], 64):
                assert owners.setdefault(unit, buffer) == buffer
                assert unit + 64 <= total
    peak = max(
        (
            sum(s for (a, b), s in zip(spans, sizes, strict=True) if a <= time <= b)
            for time in range(20)
        ),
        default=0,
    )
    assert peak <= total <= max(sum(sizes), 0)


def occupied(template: Template, plan: BucketPlan, bucket: Bucket) -> None:
    """Walks the steps and asserts that each operand still owns its bytes when it is read."""
    capacity = {"tokens": bucket.tokens, "requests": bucket.requests, "rows": bucket.rows}
    owner: dict[int, int] = {}
    for step in template.steps:
        for name, ref in step.operands.items():
            if ref.space != "arena":
                continue
            buffer = template.buffers[ref.index]
            size = capacity[buffer.rows] * buffer.row_bytes
            units = range(plan.offsets[ref.index] // 64, (plan.offsets[ref.index] + size) // 64)
            if name in ("y", "sum", "q_out", "k_out"):
                owner |= dict.fromkeys(units, ref.index)
            else:
                assert all(owner.get(unit) == ref.index for unit in units), (step.op, name)


def test_every_operand_is_intact_when_a_step_reads_it():
    for shape in (FAST, replace(FAST, norm="layer", parallel=True), replace(FAST, qk_norm=True)):
        compiled = compile_decoder(shape)
        template = decode_template(compiled.payload.files["graphs/template.json"])
        for bucket, (file, data) in compiled.payload.graphs.items():
            occupied(template, decode_bucket(data, file), bucket)


def test_reuse_makes_the_arena_independent_of_depth():
    sizes = {}
    for layers in (2, 6):
        module = compile_decoder(replace(FAST, layers=layers)).module
        template = lower_template(module)
        sizes[layers] = plan_bucket(template, lifetimes(template), BUCKETS[-1]).arena_bytes
    assert sizes[2] == sizes[6]

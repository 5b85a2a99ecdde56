"""The load-time self-check: it passes good programs and names bucket and op of a planted fault."""

import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from support.cpu_programs import FAST, WIDE, compile_decoder

from ropeway.compiler.artifact import Artifact
from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import RunError
from ropeway.compiler.targets.cpu.plan import (
    TEMPLATE_FILE,
    BucketPlan,
    Buffer,
    Step,
    Template,
    decode_bucket,
    decode_template,
    encode,
)
from ropeway.runtime import selfcheck
from ropeway.runtime.devices.cpu.device import CpuDevice, read_plans
from ropeway.runtime.devices.cpu.native import Team
from ropeway.runtime.devices.cpu.program import CacheMemory, Program
from ropeway.runtime.selfcheck import small_step

BF16 = replace(FAST, dtype="bf16")


def planted(
    template: Template, plans: list[BucketPlan], kernel: str
) -> tuple[Template, list[BucketPlan]]:
    """The first `kernel` step reads its x one row further on: its last true row is padding.

    A second buffer is laid over the first, one row later; the step reads that one.
    """
    number = next(i for i, step in enumerate(template.steps) if step.kernel == kernel)
    step = template.steps[number]
    x = step.operands["x"]
    buffers = [*template.buffers, template.buffers[x.index]]
    moved = msgspec.structs.replace(x, index=len(template.buffers))
    changed = msgspec.structs.replace(step, operands=step.operands | {"x": moved})
    steps = [*template.steps[:number], changed, *template.steps[number + 1 :]]
    row = template.buffers[x.index].row_bytes
    shifted = [
        msgspec.structs.replace(
            plan,
            offsets=[*plan.offsets, plan.offsets[x.index] + row],
            arena_bytes=plan.arena_bytes + row,
        )
        for plan in plans
    ]
    return msgspec.structs.replace(template, buffers=buffers, steps=steps), shifted


class Edited:
    """An artifact with other plan files."""

    def __init__(self, artifact: Artifact, template: Template, plans: list[BucketPlan]) -> None:
        self.path, self.manifest = artifact.path, artifact.manifest
        self.weights, self.function = artifact.weights, artifact.function
        self._artifact = artifact
        self._files = {TEMPLATE_FILE: encode(template)}
        for plan in plans:
            self._files[self.function.graphs[plan.bucket.name]] = encode(plan)

    def read(self, name: str) -> bytes:
        """The edited file, or the artifact's own."""
        return self._files.get(name) or self._artifact.read(name)


def parts(artifact: Artifact) -> tuple[Template, dict[Bucket, BucketPlan]]:
    template = decode_template(artifact.read(TEMPLATE_FILE))
    graphs = artifact.function.graphs
    return template, {b: decode_bucket(artifact.read(graphs[b.name]), b.name) for b in WIDE}


@pytest.mark.parametrize("shape", [FAST, BF16], ids=["f32", "bf16"])
# A norm of queries does nothing that shows in bucket 0: its one token sees one key.
@pytest.mark.parametrize(
    ("kernel", "bad"),
    [(kernel, bad) for kernel in ("gemm", "gemm_glu") for bad in (0, 2, 5)]
    + [("rms_norm", 2), ("rms_norm", 5)],
)
def test_a_kernel_that_reads_a_padding_row_fails_loading(programs, shape, kernel, bad):
    if kernel == "rms_norm":
        shape = replace(shape, qk_norm=True)
    artifact = programs(shape)[1]
    template, plans = parts(artifact)
    wrong, shifted = planted(template, list(plans.values()), kernel)
    good = [
        msgspec.structs.replace(plan, offsets=[*plan.offsets, plan.offsets[_x(template, kernel)]])
        for plan in plans.values()
    ]
    mixed = [shifted[n] if n == bad else plan for n, plan in enumerate(good)]
    mixed = [
        msgspec.structs.replace(plan, arena_bytes=other.arena_bytes)
        for plan, other in zip(mixed, shifted, strict=True)
    ]
    step = next(step for step in wrong.steps if step.kernel == kernel)
    with pytest.raises(RunError) as caught:
        CpuDevice().load(Edited(artifact, wrong, mixed), 1)
    text = str(caught.value)
    assert f"self-check of bucket {WIDE[bad].name} failed" in text
    assert f"{step.op} (kernel {kernel})" in text


def _x(template: Template, kernel: str) -> int:
    return next(step for step in template.steps if step.kernel == kernel).operands["x"].index


def test_an_unwritten_buffer_fails_loading(programs):
    """A step that adds a buffer which nobody wrote: garbage in, so the check must see NaN."""
    artifact = programs(FAST)[1]
    template, plans = parts(artifact)
    number = next(i for i, step in enumerate(template.steps) if step.kernel == "gemm_glu")
    y = template.steps[number].operands["y"]
    row = template.buffers[y.index].row_bytes
    stale = msgspec.structs.replace(y, index=len(template.buffers))
    extra = Step(
        "binary", "math.add at nowhere:1", "tokens", {"a": y, "b": stale, "y": y},
        {"op": "add", "scalar": 0.0},
    )  # fmt: skip
    changed = msgspec.structs.replace(
        template,
        buffers=[*template.buffers, Buffer("tokens", row)],
        steps=[*template.steps[: number + 1], extra, *template.steps[number + 1 :]],
    )
    grown = [
        msgspec.structs.replace(
            plan,
            offsets=[*plan.offsets, plan.arena_bytes],
            arena_bytes=plan.arena_bytes + plan.bucket.tokens * row,
        )
        for plan in plans.values()
    ]
    with pytest.raises(
        RunError, match=r"bucket decode-1 failed at step \d+, math.add at nowhere:1"
    ):
        CpuDevice().load(Edited(artifact, changed, grown), 2)


@pytest.mark.parametrize("shape", [FAST, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("op", ["add", "mul", "max"])
@pytest.mark.parametrize("padding", ["a", "b"])  # one of the two orders of a maximum drops NaN
def test_a_padding_row_is_seen_whatever_is_done_with_it(programs, shape, op, padding):
    """All buckets read it alike, so only what it holds can show it."""
    artifact = programs(shape)[1]
    template, plans = parts(artifact)
    wrong, shifted = planted(template, list(plans.values()), "gemm_glu")
    number = next(i for i, step in enumerate(wrong.steps) if step.kernel == "gemm_glu")
    x, behind = (t.steps[number].operands["x"] for t in (template, wrong))
    other = "b" if padding == "a" else "a"
    extra = Step(
        "binary", f"math.{op} at nowhere:1", "tokens", {padding: behind, other: x, "y": x},
        {"op": op, "scalar": 0.0},
    )  # fmt: skip
    steps = [*template.steps[:number], extra, *template.steps[number:]]
    changed = msgspec.structs.replace(wrong, steps=steps)
    with pytest.raises(RunError, match=rf"decode-1 failed at step {number}, math.{op} at nowhere"):
        CpuDevice().load(Edited(artifact, changed, shifted), 2)


def test_the_poison_spoils_sums_products_with_zero_and_maxima():
    """Of any two neighbours in it, f32 or bf16, one is a NaN and one beats every maximum."""
    for poison in selfcheck.POISONS:
        words = np.frombuffer(poison, "<u4")
        halves = np.frombuffer(poison, "<u2").astype("<u4") << 16
        for bits in (words, halves):
            pairs = bits.view("<f4").reshape(-1, 2)
            assert (np.isnan(pairs).sum(1) == 1).all()
            assert (np.nanmax(pairs, 1) > 3e38).all()
    one, two = (np.frombuffer(poison, "<u2") for poison in selfcheck.POISONS)
    assert ((one == 0xFFFF) == (two == 0x7F7F)).all()  # each element is both, in one or the other
    rows = one.reshape(2, 32)
    assert (rows[0] != rows[1]).all()


def test_a_product_in_pieces_has_the_bits_of_a_whole_one(tmp_path):
    """The head's weights are larger than the L2 caches; its last panel is a part of one."""
    artifact = compile_decoder(replace(FAST, vocab=20_011)).write(tmp_path / "a.rope")
    template, plans = read_plans(artifact)
    team = Team(2)
    base, apart = 0, {}
    for bucket, plan in plans.items():
        offsets = [base + offset for offset in plan.offsets]
        apart[bucket] = BucketPlan(bucket, base + plan.arena_bytes, offsets)
        base += -(-plan.arena_bytes // 4096) * 4096
    program = Program(template, apart, artifact.weights, team)
    caches = CacheMemory(template, 2 * len(plans) + 1)
    program.set_caches(caches)
    jobs = [(b, small_step(b, program.groups, 1 + 2 * n)) for n, b in enumerate(plans)]
    program.run_together(jobs)
    together = [program.logits(b, len(inputs.rows)).copy() for b, inputs in jobs]
    for (bucket, inputs), found in zip(jobs, together, strict=True):
        program.logits(bucket, len(inputs.rows))[:] = np.nan
        program.run(bucket, inputs)
        assert program.logits(bucket, len(inputs.rows)).tobytes() == found.tobytes()
        assert np.ptp(found) > 0
    program.close()
    team.close()


def test_small_steps_have_two_true_rows_and_fit_their_bucket():
    for bucket in WIDE:
        tokens, requests, rows = small_step(bucket, 1, 5).counts
        assert tokens == min(2, bucket.tokens)
        assert requests <= bucket.requests and 1 <= rows <= bucket.rows
    inputs = small_step(WIDE[-1], 2, 5)
    assert inputs.query_start.tolist() == [0, 2] and inputs.lengths.tolist() == [2]
    assert [slots.tolist() for slots in inputs.slots] == [[160, 161]] * 2


def test_every_bucket_is_checked(programs, monkeypatch):
    seen = []
    small = selfcheck.small_step

    def spy(bucket, groups, first_block=1):
        seen.append(bucket)
        return small(bucket, groups, first_block)

    monkeypatch.setattr(selfcheck, "small_step", spy)
    device = CpuDevice()
    device.load(programs(FAST)[1], 1)
    device.close()
    assert seen == list(WIDE)


def test_the_check_of_a_tiny_program_takes_no_time(programs):
    artifact = programs(FAST)[1]
    start = time.perf_counter()
    device = CpuDevice()
    device.load(artifact, 1)
    device.close()
    assert time.perf_counter() - start < 2.0


def test_a_program_in_many_waves_is_checked_alike(monkeypatch, tmp_path):
    monkeypatch.setattr(selfcheck, "_WAVE_BYTES", 1)
    device = CpuDevice()
    device.load(compile_decoder(FAST).write(tmp_path / "a.rope"), 1)
    device.close()

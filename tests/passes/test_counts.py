"""How often each fusion matches, exactly, on decoders of published shapes."""

from __future__ import annotations

import pytest
from support.decoder_text import Shape, decoder_text

from ropeway.compiler.driver.import_model import import_model
from ropeway.compiler.errors import PipelineError
from ropeway.compiler.ir.parser import parse_module
from ropeway.compiler.ir.printer import print_module
from ropeway.compiler.ops.text import read_module
from ropeway.passes import default_pipeline

SMOLLM2 = Shape(
    layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, inter=1536, vocab=49152,
    positions=8192, dtype="bf16",
)  # fmt: skip
FUSIONS = (
    "fuse-qkv", "fuse-gate-up", "fuse-swiglu", "fuse-add-norm", "fuse-norm-linear", "fuse-rope",
    "fuse-attention", "lower-lm-head",
)  # fmt: skip


def _counts(shape):
    _, report = default_pipeline().run(read_module(decoder_text(shape)), verify_each=True)
    return tuple(report.matches(name) for name in FUSIONS), report


def _misses(report, name):
    entry = next(entry for entry in report.passes if entry.name == name)
    return [(miss.count, miss.op, miss.constraint) for miss in entry.near_misses]


def test_smollm2_counts():
    counts, report = _counts(SMOLLM2)
    assert counts == (30, 30, 30, 60, 61, 30, 30, 1)
    first_norm = "the normed value must come from math.add, but it is the result of nn.embedding"
    assert _misses(report, "fuse-add-norm") == [(1, "nn.embedding %x1", first_norm)]
    assert all(not _misses(report, name) for name in FUSIONS if name != "fuse-add-norm")


@pytest.mark.slow
def test_smollm2_counts_on_the_checkpoint(smollm2_gguf):
    """The same on the real file, through the importer and the raising passes."""
    module = import_model(smollm2_gguf, dtype="bf16", max_model_len=2048).module
    result, report = default_pipeline().run(module, verify_each=True)
    assert tuple(report.matches(name) for name in FUSIONS) == (30, 30, 30, 60, 61, 30, 30, 1)
    assert all(not _misses(report, name) for name in FUSIONS if name != "fuse-add-norm")
    assert parse_module(print_module(result)) == result


def test_smollm2_keeps_the_head_tied_and_the_gains_apart():
    result, _ = default_pipeline().run(read_module(decoder_text(SMOLLM2)))
    readers = [op.name for op in result.fn.ops if any(w.name == "embed.weight" for w in op.args)]
    assert readers == ["nn.embedding", "nn.add_rms_norm_linear"]
    gains = [name for name in result.weights if name.endswith("norm.weight")]
    assert len(gains) == 61


@pytest.mark.parametrize(
    ("shape", "counts"),
    [
        (Shape(bias="qkv"), (2, 2, 2, 4, 5, 2, 2, 1)),
        (Shape(bias="qkvogudh"), (2, 2, 2, 4, 5, 2, 2, 1)),
        (Shape(qk_norm=True), (2, 2, 2, 4, 5, 2, 2, 1)),
        (Shape(windows=(4, 0)), (2, 2, 2, 4, 5, 2, 2, 1)),
        # Norms after the branches too: those read a GEMM's result, not a sum.
        (Shape(post_norm=True), (2, 2, 2, 4, 5, 2, 2, 1)),
        # qkv and gate-up are one GEMM in the checkpoint already.
        (Shape(merged_qkv=True, merged_gate_up=True), (0, 0, 2, 4, 5, 2, 2, 1)),
        # Two norms read one sum: the first takes the addition in, the second reads the sum.
        (Shape(parallel=True), (2, 2, 2, 2, 5, 2, 2, 1)),
        (Shape(norm="layer"), (2, 2, 2, 0, 0, 2, 2, 1)),
        # Unmerged projections leave the attention norms with three readers each.
        (Shape(bias="qv"), (0, 2, 2, 4, 3, 2, 2, 1)),
        (Shape(act="nn.relu"), (2, 2, 0, 4, 5, 2, 2, 1)),
        (Shape(rope=False), (2, 2, 2, 4, 5, 0, 2, 1)),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else None,
)
def test_counts_of_other_structures(shape, counts):
    assert _counts(shape)[0] == counts


def test_misses_say_why():
    _, report = _counts(Shape(bias="qv"))
    assert _misses(report, "fuse-qkv") == [
        (2, "nn.linear %k4", "q, k and v must all have a bias or none; here: bias, no bias, bias")
    ]
    _, report = _counts(Shape(norm="layer"))
    reason = "an RMS norm: layer norms have no fused kernel"
    assert _misses(report, "fuse-add-norm")[0][::2] == (4, reason)
    assert _misses(report, "fuse-norm-linear")[0][::2] == (5, reason)
    _, report = _counts(Shape(act="nn.relu"))
    assert _misses(report, "fuse-swiglu")[0][::2] == (2, "nn.glu has no activation nn.relu")
    _, report = _counts(Shape(merged_qkv=True, merged_gate_up=True))
    assert _misses(report, "fuse-qkv")[0][::2] == (2, "q, k and v are one nn.linear already")


def test_strict_fusion_fails_with_the_nearest_miss():
    module = read_module(decoder_text(Shape(bias="qv")))
    with pytest.raises(PipelineError) as error:
        default_pipeline().run(module, strict_fusion=True)
    text = str(error.value)
    assert "'fuse-qkv' matched nothing" in text
    assert "nn.linear %k4 (m.py:12): q, k and v must all have a bias or none" in text


def test_cache_groups_follow_planes_and_windows():
    result, _ = default_pipeline().run(
        read_module(decoder_text(Shape(layers=4, windows=(4, 0, 4, 8))))
    )
    caches = [entry.value.type.group for entry in result.fn.inputs if entry.role == "cache"]
    assert caches == [0, 1, 0, 2]
    roles = {entry.role for entry in result.fn.inputs} - {"cache"}
    assert roles == {
        "ids", "positions", "rows", "query_start", "lengths",
        "slots.0", "slots.1", "slots.2", "block_table.0", "block_table.1", "block_table.2",
    }  # fmt: skip

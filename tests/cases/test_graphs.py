"""Graphs, buckets and padding, through LLM: what a request says never depends on them."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cpu_programs import FAST, compile_decoder
from support.tiny_checkpoint import byte_prompt

import ropeway
from ropeway.compiler.config import Bucket, choose_bucket
from ropeway.passes import CATALOGUE, default_pipeline
from ropeway.runtime.devices.cpu.device import CpuDevice

Greedy = Callable[[list[int], int], list[int]]
PARAMS = ropeway.SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)


def tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


# --- eager and graphs, chunk by chunk ---


@pytest.fixture(scope="module")
def eager(checkpoint: Path) -> ropeway.Program:
    """The same model for the interpreter, which knows no graphs, plans or padding."""
    return ropeway.compile(
        checkpoint, target="reference", dtype="float32", max_num_batched_tokens=64
    )


@pytest.mark.parametrize("chunk", [1, 7, 16, None])
@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_eager_and_graph_in_chunks_of_any_size(
    artifact: Path, eager: ropeway.Program, greedy: Greedy, target: str, chunk: int | None
) -> None:
    prompts = [byte_prompt(length) for length in (1, 7, 8, 33, 70)]
    program = artifact if target == "cpu" else eager
    with ropeway.LLM(program, max_prefill_chunk=chunk) as llm:
        outputs = llm.generate(prompts, PARAMS)
    assert [tokens(output) for output in outputs] == [greedy(ids, 10) for ids in prompts]


# --- buckets and padding ---

SIZES = (1, 2, 4, 8)
MIXED = (16, 32)


@pytest.fixture(scope="module")
def narrow(checkpoint: Path) -> Path:
    """Decode buckets 1, 2, 4, 8 and mixed ones of 16 and 32 tokens."""
    buckets = [Bucket("decode", n, n, n) for n in SIZES]
    buckets += [Bucket("mixed", n, 8, 8) for n in MIXED]
    program = ropeway.compile(
        checkpoint, dtype="float32", max_num_batched_tokens=32, buckets=buckets
    )
    return program.save(checkpoint.with_name("narrow.rope"))


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Bucket, int]]]:
    """(bucket, tokens) of every step; before each one the whole arena is filled with NaN."""
    steps: list[tuple[Bucket, int]] = []
    submit = CpuDevice.submit

    def poisoned(self: CpuDevice, bucket: Bucket, inputs: Any) -> Any:
        steps.append((bucket, len(inputs.ids)))
        self.loaded.arena.bytes[:] = 0xFF
        return submit(self, bucket, inputs)

    monkeypatch.setattr(CpuDevice, "submit", poisoned)
    yield steps


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 16])
def test_batches_around_a_bucket_with_padding_of_nan(
    narrow: Path, greedy: Greedy, used: list[tuple[Bucket, int]], count: int
) -> None:
    prompts = [byte_prompt(3 + n % 4, n) for n in range(count)]
    with ropeway.LLM(narrow) as llm:
        alone = [llm.generate(ids, PARAMS)[0] for ids in prompts]
        device = llm._engine.device
        device.loaded.caches.fill(b"\xff")
        llm._engine.core.scheduler.pool.reset()
        used.clear()
        together = llm.generate(prompts, PARAMS)
    for one, other, ids in zip(alone, together, prompts, strict=True):
        assert other.outputs == one.outputs  # bit for bit
        assert tokens(other) == greedy(ids, 10)
    decodes = {bucket.tokens for bucket, _ in used if bucket.kind == "decode"}
    widest = min(count, max(SIZES))
    assert max(decodes, default=0) == next(size for size in SIZES if size >= widest)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_prompts_around_a_bucket_with_padding_of_nan(
    narrow: Path, greedy: Greedy, used: list[tuple[Bucket, int]], length: int
) -> None:
    ids = byte_prompt(length)
    with ropeway.LLM(narrow) as llm:
        llm._engine.device.loaded.caches.fill(b"\xff")
        output = llm.generate(ids, PARAMS)[0]
    assert tokens(output) == greedy(ids, 10)
    bucket, found = used[0]
    assert (bucket.tokens, found) == (16 if length <= 16 else 32, min(length, 32))


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_the_smallest_bucket_that_holds_the_step(kind: str) -> None:
    buckets = [Bucket(kind, n, n, n) for n in (16, 1, 4, 2, 8)]
    for count in range(1, 17):
        want = min(bucket.tokens for bucket in buckets if bucket.tokens >= count)
        assert choose_bucket(buckets, kind, count, count, count).tokens == want


def test_depth_and_buckets_cost_no_device_resources(tmp_path: Path) -> None:
    """A deep model with many buckets: plans are data, one arena serves all of them."""
    buckets = [Bucket("decode", n, n, n) for n in range(1, 33)]
    buckets += [Bucket("mixed", n, 32, 32) for n in range(64, 96)]
    deep = replace(FAST, layers=32)
    shallow = compile_decoder(FAST, buckets=buckets)
    compiled = compile_decoder(deep, buckets=buckets)
    arenas = [item.arena_bytes for item in compiled.payload.memory]
    assert arenas == [item.arena_bytes for item in shallow.payload.memory]
    compiled.write(tmp_path / "deep.rope")
    with ropeway.LLM(tmp_path / "deep.rope") as llm:
        assert llm._engine.device.memory().arena < max(arenas) + 65536
        ids = np.random.default_rng(1).integers(0, FAST.vocab, 90).tolist()
        assert len(tokens(llm.generate(ids, PARAMS)[0])) == 10


# --- fusions ---

SHAPES = {
    "f32": FAST,
    "biases": replace(FAST, bias="qkvogudh", tied=False),
    "bf16": replace(FAST, dtype="bf16", qk_norm=True, windows=(0, 7)),
}
DROPPED = {
    "swiglu": "fuse-swiglu",
    "norm-linear": "fuse-norm-linear",
    "rope": "fuse-rope",
    "qkv": "fuse-qkv",
    "gate-up": "fuse-gate-up,fuse-swiglu",
    "add-norm": "fuse-add-norm",
    "all": "fuse-qkv,fuse-gate-up,fuse-swiglu,fuse-add-norm,fuse-norm-linear,fuse-rope",
}


def logprobs(path: Path, vocab: int) -> np.ndarray:
    ids = np.random.default_rng(5).integers(0, vocab, 40).tolist()
    params = ropeway.SamplingParams(
        temperature=0, max_tokens=1, logprobs=vocab, prompt_logprobs=vocab
    )
    with ropeway.LLM(path, max_prefill_chunk=16) as llm:
        output = llm.generate([ids], params)[0]
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return np.array([[entry[token].logprob for token in range(vocab)] for entry in entries])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_fused_and_unfused_agree_on_cpu(tmp_path: Path, shape: Any) -> None:
    """Every subset that someone may leave out of the pipeline lowers, and says the same."""
    compile_decoder(shape).write(tmp_path / "fused.rope")
    fused = logprobs(tmp_path / "fused.rope", shape.vocab)
    assert np.isfinite(fused).all()
    for name, gone in DROPPED.items():
        spec = default_pipeline().spec
        for item in gone.split(","):
            spec = spec.replace(f"{item},", "")
        pipeline = ropeway.Pipeline.parse(spec, CATALOGUE)
        compile_decoder(shape, pipeline=pipeline).write(tmp_path / f"{name}.rope")
        found = logprobs(tmp_path / f"{name}.rope", shape.vocab)
        # bf16 rounds at every op, and fusing drops or moves some of the roundings.
        assert np.abs(found - fused).max() < (0.2 if shape.dtype == "bf16" else 1e-4), name


def test_what_is_printed_is_what_ran(checkpoint: Path) -> None:
    """A fusion that isn't in the pipeline, or found nothing, is never shown as fused."""
    spec = ",".join(
        item
        for item in default_pipeline().spec.split(",")
        if item not in ("fuse-rope", "fuse-norm-linear")
    )
    spec = spec.replace("fuse-swiglu", "fuse-swiglu,fuse-swiglu")  # the second finds nothing
    program = ropeway.compile(checkpoint, dtype="float32", max_num_batched_tokens=64, pipeline=spec)
    kinds = {op.name for op in program.module.fn.ops}
    assert {"nn.rope", "nn.add_rms_norm"} <= kinds
    assert not kinds & {"nn.rope_qk", "nn.rms_norm_linear", "nn.add_rms_norm_linear"}
    fused, _, missed = program.explain().partition("Not fused:")
    shown = dict(re.findall(r"^  (fuse-[a-z-]+) +(\d+) ", fused, re.MULTILINE))
    assert "fuse-rope" not in shown and "fuse-norm-linear" not in shown
    assert shown["fuse-qkv"] == shown["fuse-swiglu"] == "2"
    assert "fuse-swiglu" in missed
    ran = [entry.name for entry in program.report.passes]
    assert "fuse-rope" not in ran and ran.count("fuse-swiglu") == 2

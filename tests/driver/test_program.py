"""A program: compiled, explained, saved, loaded; the same one before and after."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.tiny_checkpoint import make_checkpoint
from support.zoo import tiny_model

import ropeway
from ropeway.compiler.ir.fingerprint import fingerprint
from ropeway.compiler.ir.printer import print_module
from ropeway.passes import CATALOGUE, GIVEN, default_pipeline


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def program(checkpoint: Path) -> ropeway.Program:
    return ropeway.compile(checkpoint, dtype="float32", max_num_batched_tokens=64)


def test_metadata(program: ropeway.Program) -> None:
    manifest = program.metadata
    assert (manifest.target, manifest.dtype) == ("cpu", "f32")
    assert (manifest.model.vocab_size, manifest.model.max_model_len) == (260, 128)
    assert manifest.model.architecture == "LlamaForCausalLM"
    (group,) = manifest.cache_groups
    assert [(p.name, p.dtype, p.shape) for p in group.planes] == [
        ("k", "f32", (2, 8)),
        ("v", "f32", (2, 8)),
    ]
    assert (group.layers, group.block_size, group.window) == (2, 32, 0)
    # (k, v) x 2 heads x head dim 8 padded to 32 x 32 tokens x 4 bytes, in 2 layers
    assert group.bytes_per_block == 2 * 2 * 32 * 32 * 4 * 2
    assert manifest.command == (
        "ropeway compile tiny -o NAME.rope --target cpu --dtype f32 --max-num-batched-tokens 64"
    )
    assert {role for role in (i.role for i in manifest.functions[0].inputs)} == {
        "ids",
        "positions",
        "rows",
        "slots.0",
        "block_table.0",
        "query_start",
        "lengths",
    }


def test_save_and_load_give_the_same_program(program: ropeway.Program, tmp_path: Path) -> None:
    program.save(tmp_path / "a.rope")
    loaded = ropeway.load(tmp_path / "a.rope", verify="full")
    assert loaded.artifact is not None
    assert loaded.explain(1 << 30) == program.explain(1 << 30)
    assert loaded.report == program.report
    assert loaded.metadata.functions == program.metadata.functions
    loaded.save(tmp_path / "b.rope")
    for path in (tmp_path / "a.rope").rglob("*"):
        if path.is_file():
            other = tmp_path / "b.rope" / path.relative_to(tmp_path / "a.rope")
            assert other.read_bytes() == path.read_bytes(), path


def test_module_is_the_one_that_was_lowered(program: ropeway.Program) -> None:
    module = program.module
    assert fingerprint(module) == program.metadata.functions[0].fingerprint
    assert print_module(module).startswith("module @")


def test_weights_are_those_of_the_checkpoint(
    program: ropeway.Program, checkpoint: Path, tmp_path: Path
) -> None:
    """The embedding isn't packed: it is there bit for bit, beside the packed head."""
    tensors = load_file(checkpoint / "model.safetensors")
    artifact = ropeway.load(program.save(tmp_path / "a.rope")).artifact
    assert artifact is not None
    stored = {
        name: artifact.weights.view(name)
        for name, entry in artifact.weights.tensors.items()
        if entry.shape == (260, 32)
    }
    embedding = tensors["model.embed_tokens.weight"].numpy()
    assert any(np.array_equal(view, embedding) for view in stored.values())
    # The head, [260, 32] as 9 panels of 32 rows, each panel with its columns inside: [9, 32, 32].
    head = tensors["lm_head.weight"].numpy()
    padded = np.zeros((288, 32), np.float32)
    padded[:260] = head
    panels = padded.reshape(9, 32, 32).transpose(0, 2, 1)
    assert any(
        entry.shape == (9, 32, 32) and np.array_equal(artifact.weights.view(name), panels)
        for name, entry in artifact.weights.tensors.items()
    )


def test_bf16_weights_are_rounded_once(checkpoint: Path, tmp_path: Path) -> None:
    program = ropeway.compile(checkpoint, max_num_batched_tokens=64)
    artifact = ropeway.load(program.save(tmp_path / "a.rope")).artifact
    assert artifact is not None
    expected = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    bits = expected.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert any(
        entry.dtype == "bf16" and np.array_equal(artifact.weights.view(name), bits)
        for name, entry in artifact.weights.tensors.items()
        if entry.shape == (260, 32)
    )


def test_pipeline_may_be_a_spec_or_a_pipeline(checkpoint: Path) -> None:
    spec = "raise-gqa,canonicalize,cse,dce,fuse-attention,lower-lm-head,dce"
    by_spec = ropeway.compile(checkpoint, target="reference", pipeline=spec)
    assert by_spec.metadata.command.endswith(f"--dtype bf16 --pipeline {spec}")
    assert by_spec.report.matches("fuse-qkv") == 0
    assert by_spec.report.matches("fuse-attention") == 2
    pipeline = ropeway.Pipeline.parse(spec, CATALOGUE, given=GIVEN)
    by_value = ropeway.compile(checkpoint, target="reference", pipeline=pipeline)
    assert print_module(by_value.module) == print_module(by_spec.module)


def test_a_module_is_made_again_in_python() -> None:
    program = ropeway.compile(tiny_model("llama"), target="reference", max_model_len=32)
    assert program.tokenizer is None
    assert program.metadata.command == (
        "ropeway.compile(LlamaForCausalLM(...), target='reference', dtype='bf16', "
        "max_model_len=32).save('NAME.rope')"
    )


def test_explain_counts_a_pass_that_ran_twice_once(program: ropeway.Program) -> None:
    (others,) = [line for line in program.explain().splitlines() if line.startswith("Other passes")]
    counts = dict(item.split() for item in others.partition(": ")[2].split(", "))
    assert int(counts["dce"]) == program.report.matches("dce")
    assert others.count("dce") == 1


def test_explain_names_what_matched_and_what_did_not(
    program: ropeway.Program, checkpoint: Path
) -> None:
    lines = [line.split() for line in program.explain().splitlines() if "  fuse-" in line]
    counts = {line[0]: line[1] for line in lines}
    assert counts["fuse-qkv"] == "2"
    assert counts["fuse-swiglu"] == "2"
    assert counts["fuse-norm-linear"] == "5"
    assert "KV bytes per token: 1024" in program.explain()
    # A second fuse-qkv finds nothing left.
    spec = default_pipeline().spec.replace("fuse-qkv,", "fuse-qkv,fuse-qkv,")
    bare = ropeway.compile(checkpoint, target="reference", pipeline=spec).explain()
    fused, _, missed = bare.partition("Not fused:")
    assert "fuse-qkv            2" in fused
    assert "fuse-qkv" in missed

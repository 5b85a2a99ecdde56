"""Tiny decoders compiled for target cpu, with random weights, and the inputs of a step.

The oracle is the interpreter on the module as it was before any pass: one sequence, nn.sdpa.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ropeway.compiler.artifact import Artifact, open_artifact
from ropeway.compiler.artifact.writer import write_artifact
from ropeway.compiler.config import Bucket, choose_bucket, default_buckets
from ropeway.compiler.driver.contents import Origin, build_contents
from ropeway.compiler.driver.options import CompileOptions
from ropeway.compiler.ir.graph import Module
from ropeway.compiler.ops.interpreter import run
from ropeway.compiler.ops.text import read_module
from ropeway.compiler.pipeline.pipeline import Pipeline
from ropeway.compiler.pipeline.report import Report
from ropeway.compiler.targets.base import Payload, activate
from ropeway.passes import default_pipeline
from ropeway.passes.lowering import lowering_pipeline
from ropeway.runtime.devices.base import Device, StepInputs
from support.decoder_text import Shape, decoder_text

BUCKETS = tuple(default_buckets(4, 64))
# Wide enough that a test can ask for every token's logits.
WIDE = (
    *(Bucket("decode", n, n, n) for n in (1, 2, 4, 8)),
    *(Bucket("mixed", n, 8, n) for n in (64, 128)),
)
FAST = Shape(hidden=64, heads=4, kv_heads=2, head_dim=16, inter=96, vocab=80, positions=160)


class Tensors:
    """A TensorSource over a dict."""

    def __init__(self, held: Mapping[str, torch.Tensor]) -> None:
        self._held = dict(held)

    def names(self) -> Iterable[str]:
        """All names."""
        return self._held

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape)."""
        tensor = self._held[name]
        names = {torch.float32: "f32", torch.bfloat16: "bf16"}
        return names[tensor.dtype], tuple(tensor.shape)

    def get(self, name: str) -> torch.Tensor:
        """The tensor."""
        return self._held[name]


@dataclass(frozen=True)
class Compiled:
    """A decoder: as imported, as lowered, its payload and weights."""

    imported: Module
    module: Module
    payload: Payload
    tensors: Tensors
    shape: Shape
    buckets: tuple[Bucket, ...]

    def write(
        self, path: Path, target: str = "cpu", tokenizer_files: Mapping[str, bytes] | None = None
    ) -> Artifact:
        """Save as an artifact and open it."""
        dtype = self.shape.dtype
        options = CompileOptions(target, dtype, None, self.buckets, self.buckets[-1].tokens)
        origin = Origin(
            source=self.tensors,
            constants=Tensors({}),
            name="tiny",
            architecture="test",
            vocab_size=self.shape.vocab,
            max_model_len=self.shape.positions,
            command="ropeway compile tiny -o tiny.rope",
            tokenizer_files=dict(tokenizer_files or {}),
        )
        report = Report("", [])
        contents = build_contents(self.module, self.payload, report, options, origin)
        write_artifact(path, contents)
        return open_artifact(path)

    def oracle(self, ids: Sequence[int]) -> np.ndarray:
        """float32 logits [T, V] of one sequence, from the module that no pass touched."""
        inputs = {
            "ids": torch.tensor(ids, dtype=torch.int32),
            "positions": torch.arange(len(ids), dtype=torch.int32),
        }
        return run(self.imported, "step", inputs, self.tensors)["logits"].float().numpy()


def random_tensors(module: Module, seed: int) -> Tensors:
    """Weights of every name that the module reads from its checkpoint, at sensible scales."""
    generator = torch.Generator().manual_seed(seed)
    held: dict[str, torch.Tensor] = {}
    for weight in module.weights.values():
        shape = [int(size) for size in weight.type.shape]
        values = torch.randn(shape, generator=generator)
        if weight.name == "rope":
            values = rope_table(shape[0], shape[1])
        elif len(shape) == 2:
            values = values * (2.0 / shape[1] ** 0.5)
        else:
            values = 1.0 + 0.2 * values
        dtype = torch.float32 if weight.type.dtype.value == "f32" else torch.bfloat16
        held[weight.name] = values.to(dtype)
    return Tensors(held)


def rope_table(positions: int, rotary: int) -> torch.Tensor:
    """cos and sin of the default rope, base 10000: [positions, rotary]."""
    frequencies = 10000.0 ** (-torch.arange(0, rotary, 2).float() / rotary)
    angles = torch.arange(positions).float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def compile_decoder(
    shape: Shape,
    seed: int = 0,
    target: str = "cpu",
    buckets: Sequence[Bucket] = BUCKETS,
    pipeline: Pipeline | None = None,
) -> Compiled:
    """Through `pipeline` (the default one if None) and the target's lowering."""
    imported = read_module(decoder_text(shape))
    chosen = activate(target, "a test").target
    module, _ = (pipeline or default_pipeline()).run(imported)
    module, _ = lowering_pipeline(chosen).run(module)
    payload = chosen.lower(module, buckets)
    return Compiled(
        imported, module, payload, random_tensors(imported, seed), shape, tuple(buckets)
    )


def step_of(
    requests: Sequence[tuple[Sequence[int], int]],
    groups: int = 1,
    width: int = 6,
    block_size: int = 32,
    rows: Sequence[int] | None = None,
) -> StepInputs:
    """Inputs of one step: each request is (all its tokens so far, how many of them are new).

    Request r owns blocks 1 + r * width ..; `rows` None wants every new token's logits.
    """
    ids, positions, slots, starts, lengths = [], [], [], [0], []
    tables = np.zeros((len(requests), width), np.int32)
    for number, (tokens, new) in enumerate(requests):
        tables[number] = 1 + number * width + np.arange(width)
        first = len(tokens) - new
        for position in range(first, len(tokens)):
            ids.append(tokens[position])
            positions.append(position)
            block = tables[number, position // block_size]
            slots.append(block * block_size + position % block_size)
        starts.append(len(ids))
        lengths.append(len(tokens))
    wanted = list(range(len(ids))) if rows is None else rows
    return StepInputs(
        ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        slots=[np.array(slots, np.int32)] * groups,
        block_tables=[tables] * groups,
        query_start=np.array(starts, np.int32),
        lengths=np.array(lengths, np.int32),
        rows=np.array(wanted, np.int32),
    )


def logits_of(device: Device, bucket: Bucket, inputs: StepInputs) -> np.ndarray:
    """A copy of the logits of one step."""
    return device.submit(bucket, inputs).logits.copy()


def run_sequence(
    device: Device, tokens: Sequence[int], chunks: Sequence[int], buckets: Sequence[Bucket]
) -> np.ndarray:
    """Logits [T, V] of one sequence fed in chunks, each in its smallest bucket."""
    found, done = [], 0
    groups = device.cache_layout.groups
    size = device.cache_layout.block_size
    width = -(-len(tokens) // size)
    for chunk in chunks:
        done += chunk
        inputs = step_of([(tokens[:done], chunk)], groups, width, size)
        bucket = choose_bucket(buckets, "decode" if chunk == 1 else "mixed", chunk, 1, chunk)
        found.append(logits_of(device, bucket, inputs))
    return np.concatenate(found)

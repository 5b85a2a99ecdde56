"""A small hand-made artifact: two odd-sized weights, two small files, one function."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ropeway.compiler.artifact.manifest import (
    FORMAT,
    KIND,
    CacheGroup,
    CacheInput,
    FunctionSpec,
    Manifest,
    ModelInfo,
    Numerics,
    PlaneSpec,
    RankSpec,
    TensorInput,
)
from ropeway.compiler.artifact.weights import WeightEntry
from ropeway.compiler.artifact.writer import ArtifactContents, write_artifact
from ropeway.compiler.config import Bucket

FIRST = np.arange(21, dtype=np.float32).reshape(3, 7)
SECOND = np.arange(5, dtype=np.uint16)


def make_contents() -> ArtifactContents:
    """Contents that every test may write; nothing in them can run."""
    function = FunctionSpec(
        name="step",
        ir="ir/step.ir",
        fingerprint="0" * 64,
        inputs=(TensorInput("ids", "ids", "i32", ("T",)),),
        caches=(CacheInput("kv0", 0, 0),),
        outputs=(TensorInput("logits", "logits", "f32", ("L", 11)),),
        graphs={"decode-1": "graphs/decode-1.json"},
    )
    plane = PlaneSpec("k", "bf16", (1, 4))
    manifest = Manifest(
        kind=KIND,
        format=FORMAT,
        producer="0.1.0",
        command="ropeway compile tiny -o tiny.rope",
        target="cpu",
        dtype="bf16",
        model=ModelInfo("tiny", "llama", vocab_size=11, max_model_len=64),
        max_num_batched_tokens=64,
        functions=(function,),
        ranks=(RankSpec(0, "weights/model.safetensors"),),
        cache_groups=(CacheGroup(0, 1, (plane,), block_size=32, bytes_per_block=256),),
        buckets=(Bucket("decode", 1, 1, 1),),
        numerics=Numerics("bf16"),
        files={},
    )
    weights = [
        WeightEntry("first", "f32", (3, 7), lambda: FIRST),
        WeightEntry("second", "bf16", (5,), lambda: SECOND),
    ]
    files = {"ir/step.ir": b"module @tiny format 1 {}\n", "graphs/decode-1.json": b"{}"}
    return ArtifactContents(manifest, files, {"weights/model.safetensors": weights})


@pytest.fixture
def contents() -> ArtifactContents:
    return make_contents()


@pytest.fixture
def make() -> Callable[[Path], Path]:
    """Writes the artifact to a path and returns the path."""

    def write(path: Path) -> Path:
        write_artifact(path, make_contents())
        return path

    return write

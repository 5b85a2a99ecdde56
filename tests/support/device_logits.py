"""Logits at every position of a text, straight from a device."""

from pathlib import Path

import numpy as np

import ropeway
from ropeway.compiler.config import choose_bucket
from ropeway.runtime.devices.base import StepInputs


def device_logits(artifact: Path, ids: list[int]) -> np.ndarray:
    """float64 [len(ids), vocab] of one sequence in one step; the bucket must hold as many rows."""
    count = len(ids)
    with ropeway.LLM(artifact) as llm:
        device = llm._engine.device
        block_size = device.cache_layout.block_size
        places = np.arange(count, dtype=np.int32)
        table = np.zeros((1, -(-llm.max_model_len // block_size)), np.int32)
        used = -(-count // block_size)
        table[0, :used] = np.arange(1, used + 1)
        inputs = StepInputs(
            ids=np.array(ids, np.int32),
            positions=places,
            slots=[(table[0, places // block_size] * block_size + places % block_size)],
            block_tables=[table],
            query_start=np.array([0, count], np.int32),
            lengths=np.array([count], np.int32),
            rows=places,
        )
        bucket = choose_bucket(device.buckets, "mixed", count, 1, count)
        return np.array(device.submit(bucket, inputs).logits, np.float64)

"""What the machine can do, measured beside the engine: the bounds its figures are held against.

Run as a program it prints one JSON object; the bench runs it in a child process, so that no
library it needs (torch, for the GEMM) is loaded beside the engine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from ropeway.compiler.errors import RunError

_READ_BYTES = 1 << 30
_GEMM_SIZE = 2048
_SAMPLES = 9


class Ceilings(msgspec.Struct):
    """Read bandwidth in GB/s (1 GiB buffer, all threads) and bf16 GEMM rate in GFLOP/s."""

    read_gb_s: float
    gemm_bf16_gflop_s: float
    gemm_by: str


def measure_in_child(threads: int) -> Ceilings:
    """Measures in a fresh process with `threads` threads."""
    command = [sys.executable, "-m", "ropeway.runtime.bench.machine", "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RunError(f"measuring the machine failed: {last}")
    return msgspec.json.decode(done.stdout, type=Ceilings)


def median_rate(work: float, run: Callable[[], object], samples: int = _SAMPLES) -> float:
    """Median of `work` / seconds over `samples` runs after one warm-up."""
    run()
    rates = []
    for _ in range(samples):
        start = time.perf_counter()
        run()
        rates.append(work / (time.perf_counter() - start))
    return statistics.median(rates)


def _read_rate(threads: int) -> float:
    import numpy as np  # noqa: PLC0415  (the child's own cost, not the engine's)

    from ropeway.runtime.devices.cpu import native  # noqa: PLC0415

    buffer = np.ones(_READ_BYTES // 4, dtype=np.float32)
    with native.Team(threads) as team:
        return median_rate(buffer.nbytes, lambda: team.read(buffer)) / 1e9


def _gemm_rate(threads: int) -> tuple[float, str]:
    try:
        import torch  # noqa: PLC0415
    except ImportError:
        return 0.0, "not measured: torch is not installed"
    torch.set_num_threads(threads)
    left = torch.randn(_GEMM_SIZE, _GEMM_SIZE).bfloat16()
    right = torch.randn(_GEMM_SIZE, _GEMM_SIZE).bfloat16()

    def run() -> None:
        for _ in range(8):
            torch.nn.functional.linear(left, right)

    rate = median_rate(8 * 2 * _GEMM_SIZE**3, run) / 1e9
    return rate, f"torch {torch.__version__}"


def main() -> None:
    """Prints the ceilings as JSON."""
    parser = argparse.ArgumentParser(prog="ropeway.runtime.bench.machine")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    threads = parser.parse_args().threads
    gemm, by = _gemm_rate(threads)
    print(json.dumps({"read_gb_s": _read_rate(threads), "gemm_bf16_gflop_s": gemm, "gemm_by": by}))


if __name__ == "__main__":
    main()

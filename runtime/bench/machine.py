"""What the machine can do, measured beside the engine: the bounds its figures are held against.

Run as a program it prints one JSON object of samples; the bench runs it in a child process, so that
no library it needs (torch, for the GEMM) is loaded beside the engine. It does so several times
between the figures: a virtual machine's cores may share a physical one for a minute and then not,
which halves its GEMM rate, and a ceiling from another minute than its figure would compare nothing.
"""

import argparse
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


class _Samples(msgspec.Struct):
    """One child's samples: GB/s and GFLOP/s."""

    read: list[float]
    gemm: list[float]
    gemm_by: str


class Ceilings:
    """Medians of the samples taken so far; `sample` takes more, in a fresh process."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._read: list[float] = []
        self._gemm: list[float] = []
        self.gemm_by = ""

    @property
    def sampled(self) -> bool:
        """Whether there are any."""
        return bool(self._read)

    @property
    def read_gb_s(self) -> float:
        """Read bandwidth: a 1 GiB buffer, all threads."""
        return statistics.median(self._read)

    @property
    def gemm_bf16_gflop_s(self) -> float:
        """Rate of a bf16 linear of 2048 cubed; 0 when it wasn't measured."""
        return statistics.median(self._gemm) if self._gemm else 0.0

    @property
    def figures(self) -> dict[str, float | str]:
        """What fractions are taken of, for the results; nothing where nothing was sampled."""
        if not self.sampled:
            return {}
        return {
            "read_gb_s": round(self.read_gb_s, 2),
            "gemm_bf16_gflop_s": round(self.gemm_bf16_gflop_s, 1),
            "gemm_by": self.gemm_by,
        }

    def sample(self) -> None:
        """Measures once more. Raises RunError when the child fails."""
        command = [sys.executable, "-m", "ropeway.runtime.bench.machine"]
        command += ["--threads", str(self._threads)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise RunError(f"measuring the machine failed: {last}")
        found = msgspec.json.decode(done.stdout, type=_Samples)
        self._read += found.read
        self._gemm += found.gemm
        self.gemm_by = found.gemm_by


def _rates(work: float, run: Callable[[], object]) -> list[float]:
    """`work` / seconds / 1e9 of several runs after one warm-up."""
    run()
    rates = []
    for _ in range(_SAMPLES):
        start = time.perf_counter()
        run()
        rates.append(work / (time.perf_counter() - start) / 1e9)
    return rates


def _read_rates(threads: int) -> list[float]:
    import numpy as np  # noqa: PLC0415  (the child's own cost, not the engine's)

    from ropeway.runtime.devices.cpu import native  # noqa: PLC0415

    buffer = np.ones(_READ_BYTES // 4, dtype=np.float32)
    with native.Team(threads) as team:
        return _rates(buffer.nbytes, lambda: team.read(buffer))


def _gemm_rates(threads: int) -> tuple[list[float], str]:
    try:
        import torch  # noqa: PLC0415
    except ImportError:
        return [], "not measured: torch is not installed"
    torch.set_num_threads(threads)
    left = torch.randn(_GEMM_SIZE, _GEMM_SIZE).bfloat16()
    right = torch.randn(_GEMM_SIZE, _GEMM_SIZE).bfloat16()

    def run() -> None:
        for _ in range(8):
            torch.nn.functional.linear(left, right)

    return _rates(8 * 2 * _GEMM_SIZE**3, run), f"torch {torch.__version__}"


def main() -> None:
    """Prints one sample set as JSON."""
    parser = argparse.ArgumentParser(prog="ropeway.runtime.bench.machine")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    threads = parser.parse_args().threads
    gemm, by = _gemm_rates(threads)
    samples = _Samples(read=_read_rates(threads), gemm=gemm, gemm_by=by)
    sys.stdout.buffer.write(msgspec.json.encode(samples))


if __name__ == "__main__":
    main()

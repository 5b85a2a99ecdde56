"""Rates of single kernels at SmolLM2-135M's sizes: GB/s, GFLOP/s, microseconds.

Run it as `python tests/benchmarks/kernel_rates.py [--level amx] [--threads 2]`. Each figure is the
best of many short repetitions, so that a neighbour on the machine costs repetitions, not digits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support import kernel_calls as kc

LAYERS, HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 30, 576, 1536, 49152, 9, 3, 64
LINEARS = [(960, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN)]  # (n, k)
RNG = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    """A bf16 matrix."""
    return kc.to_bf16(RNG.standard_normal(shape))


def weight(n: int, k: int) -> np.ndarray:
    """A panel32 bf16 weight; its values don't matter, its bytes do."""
    out = kc.aligned((n // 32, k // 2, 32, 2), kc.BF16)
    out[...] = 0x3C00 + np.arange(out.size, dtype=np.uint32).reshape(out.shape) % 127
    return out


def linear(rows: int, w: np.ndarray, x: np.ndarray, y: np.ndarray) -> kc.GemmArgs:
    """One call of gemm."""
    return kc.GemmArgs(
        rows=rows, n=w.shape[0] * 32, k=w.shape[1] * 2, x=kc.view(x), y=kc.view(y),
        weight=kc.pointer(w),
    )  # fmt: skip


def bandwidth(level: str, threads: int) -> None:
    """Read rate of a 1 GiB buffer."""
    data = np.ones(1 << 27, dtype=np.uint64)
    reading = kc.Reading(data.ctypes.data, data.nbytes)
    seconds = kc.run(level, "read_sum", reading, threads=threads, repeats=5)
    print(f"read {data.nbytes / seconds / 1e9:.1f} GB/s")


def square(level: str, threads: int) -> None:
    """A linear of 2048 cubed."""
    w, x, y = weight(2048, 2048), numbers(2048, 2048), kc.fresh((2048, 2048), kc.BF16)
    seconds = kc.run(level, "gemm", linear(2048, w, x, y), threads=threads, repeats=10)
    print(f"gemm 2048^3 {2 * 2048**3 / seconds / 1e9:.0f} GFLOP/s")


def all_linears(level: str, threads: int) -> None:
    """Every weight of the model once, as a step of `rows` tokens reads them."""
    layers = [weight(n, k) for _ in range(LAYERS) for n, k in LINEARS]
    head = weight(VOCAB, HIDDEN)
    for rows in (1, 2, 4, 8, 16, 32, 64, 256, 1024):
        wanted = rows if rows <= 64 else 1  # rows of logits
        x = {k: numbers(rows, k) for k in (HIDDEN, FFN)}
        y = kc.fresh((rows, 2 * FFN), kc.BF16)
        logits = kc.fresh((wanted, VOCAB), kc.F32)
        calls = [linear(rows, w, x[w.shape[1] * 2], y) for w in layers]
        calls.append(linear(wanted, head, x[HIDDEN], logits))
        seconds = kc.run(level, "gemm", calls, threads=threads, repeats=5)
        size = sum(w.nbytes for w in [*layers, head])
        flops = sum(w.size for w in layers) * 2 * rows + head.size * 2 * wanted
        print(
            f"linears, {rows:4d} rows: {seconds * 1e3:7.2f} ms {size / seconds / 1e9:5.1f} GB/s "
            f"{flops / seconds / 1e9:6.0f} GFLOP/s"
        )


def attention(level: str, threads: int, shape: tuple[int, int, int]) -> None:
    """One layer's attention and cache write: requests, new tokens of each, context of each."""
    requests, new, context = shape
    tokens, blocks = requests * new, requests * -(-context // 32) + 1
    planes = [numbers(blocks, KV_HEADS * HEAD_DIM * 32) for _ in range(2)]
    caches = [kc.CachePlane(p.ctypes.data, p.shape[1] * 2) for p in planes]
    qkv, y = numbers(tokens, 960), kc.fresh((tokens, HIDDEN), kc.BF16)
    table = np.arange(1, blocks, dtype=np.int32).reshape(requests, -1).copy()
    starts = (np.arange(requests + 1) * new).astype(np.int32)
    lengths = np.full(requests, context, dtype=np.int32)
    positions = np.arange(context - new, context)
    slots = np.concatenate([t[positions // 32] * 32 + positions % 32 for t in table])
    slots = slots.astype(np.int32)
    read = kc.AttentionArgs(
        tokens=tokens, requests=requests, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM, dtype=kc.BF16, scale=0.125, q=kc.view(qkv), y=kc.view(y),
        k_cache=caches[0], v_cache=caches[1], block_table=kc.pointer(table),
        table_stride=table.shape[1], query_start=kc.pointer(starts), lengths=kc.pointer(lengths),
    )  # fmt: skip
    write = kc.KvWriteArgs(
        tokens=tokens, kv_heads=KV_HEADS, head_dim=HEAD_DIM, v_head_dim=HEAD_DIM, dtype=kc.BF16,
        k=kc.view(qkv[:, HIDDEN:], 960), v=kc.view(qkv[:, HIDDEN + 192 :], 960),
        k_cache=caches[0], v_cache=caches[1], slots=kc.pointer(slots),
    )  # fmt: skip
    repeats = 30 if new > 1 else 300
    times = [
        kc.run(level, name, args, threads=threads, repeats=repeats) * 1e6
        for name, args in (("attention", read), ("kv_write", write))
    ]
    print(
        f"{requests} x {new} tokens at {context}: attention {times[0]:.1f} us, "
        f"kv_write {times[1]:.1f} us a layer"
    )


def rowwise(level: str, threads: int, rows: int) -> None:
    """Norm, rope and glu on `rows` tokens."""
    h, residual, total = numbers(rows, HIDDEN), numbers(rows, HIDDEN), numbers(rows, HIDDEN)
    out, gain, qkv = numbers(rows, HIDDEN), numbers(1, HIDDEN), numbers(rows, 960)
    both, gated = numbers(rows, 2 * FFN), numbers(rows, FFN)
    table = RNG.standard_normal((rows, HEAD_DIM)).astype(np.float32)
    positions = np.arange(rows, dtype=np.int32)
    q, k = kc.view(qkv), kc.view(qkv[:, HIDDEN:], 960)
    calls = {
        "rms_norm": kc.RmsNormArgs(
            rows=rows, heads=1, width=HIDDEN, x=kc.view(h), residual=kc.view(residual),
            sum=kc.view(total), y=kc.view(out), gain=kc.pointer(gain), eps=1e-5,
        ),
        "rope": kc.RopeArgs(
            rows=rows, q_heads=HEADS, k_heads=KV_HEADS, head_dim=HEAD_DIM, rotary_dim=HEAD_DIM,
            q=q, k=k, q_out=q, k_out=k, positions=kc.pointer(positions), table=kc.pointer(table),
            table_stride=HEAD_DIM,
        ),
        "glu": kc.GluArgs(rows=rows, width=FFN, x=kc.view(both), y=kc.view(gated), act=0),
    }  # fmt: skip
    times = [
        f"{name} {kc.run(level, name, args, threads=threads, repeats=100) * 1e6:.1f} us"
        for name, args in calls.items()
    ]
    print(f"{rows} rows: {', '.join(times)}")


def main() -> None:
    """Prints every rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default=(kc.levels() or ["none"])[0])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if kc.library() is None:
        sys.exit("the native kernels are not built: pip install -e . with a C++17 compiler")
    print(f"{options.level}, {options.threads} threads; this machine has {', '.join(kc.levels())}")
    bandwidth(options.level, options.threads)
    square(options.level, options.threads)
    all_linears(options.level, options.threads)
    for shape in [
        (1, 1024, 1024),
        (1, 128, 128),
        (1, 1, 128),
        (1, 1, 1024),
        (1, 1, 8192),
        (32, 1, 200),
    ]:
        attention(options.level, options.threads, shape)
    for rows in (1, 32, 1024):
        rowwise(options.level, options.threads, rows)


if __name__ == "__main__":
    main()

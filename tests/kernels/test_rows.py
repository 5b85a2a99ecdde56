"""Norms, gated units, rotary embedding and look-ups against float64, on odd shapes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support import kernel_calls as kc

DTYPES = pytest.mark.parametrize("dtype", [kc.BF16, kc.F32], ids=["bf16", "f32"])
WIDTHS = [1, 3, 16, 31, 64, 70, 577]


def close(y: np.ndarray, expected: np.ndarray, scale: float = 1.0) -> None:
    """Within a rounding of the stored type."""
    tolerance = scale * (2.0**-8 if y.dtype == np.uint16 else 3e-6)
    np.testing.assert_allclose(kc.value(y), expected, rtol=tolerance, atol=tolerance)


def norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * gain


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(level: str, width: int, dtype: int, rng: np.random.Generator) -> None:
    x = kc.stored(rng.standard_normal((5, 3 * width)), dtype)
    gain = kc.stored(rng.standard_normal(width), dtype)
    for offset, g in ((0.0, gain), (1.0, gain), (0.0, None)):
        y = kc.fresh((6, 3 * width), dtype)
        args = kc.RmsNormArgs(
            rows=5, heads=3, width=width, x=kc.view(x), y=kc.view(y), gain=kc.pointer(g),
            eps=1e-3, offset=offset,
        )  # fmt: skip
        kc.run(level, "rms_norm", args, threads=2)
        scale = 1.0 if g is None else kc.value(g) + offset
        expected = norm(kc.value(x).reshape(5, 3, width), scale, 1e-3)
        close(y[:5], expected.reshape(5, -1))
        assert (y[5].view(np.uint8) == 0xFF).all()


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("in_place", ["apart", "x", "residual"])
def test_add_rms_norm_rounds_the_sum_first(
    level: str, width: int, in_place: str, dtype: int, rng: np.random.Generator
) -> None:
    x = kc.stored(rng.standard_normal((4, width)), dtype)
    residual = kc.stored(rng.standard_normal((4, width)) * 9, dtype)
    exact_sum = kc.value(x).astype(np.float32) + kc.value(residual).astype(np.float32)
    expected_sum = kc.stored(exact_sum, dtype)
    total = {"x": x, "residual": residual}.get(in_place, kc.fresh((4, width), dtype))
    y = kc.fresh((4, width), dtype)
    args = kc.RmsNormArgs(
        rows=4, heads=1, width=width, x=kc.view(x), residual=kc.view(residual),
        sum=kc.view(total), y=kc.view(y), eps=1e-6,
    )  # fmt: skip
    kc.run(level, "rms_norm", args, threads=3)
    assert (total == expected_sum).all()
    close(y, norm(kc.value(expected_sum), np.ones(width), 1e-6))


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(level: str, width: int, dtype: int, rng: np.random.Generator) -> None:
    x = kc.stored(rng.standard_normal((5, 2, width)) + 30, dtype)
    gain, bias = (kc.stored(rng.standard_normal(width), dtype) for _ in range(2))
    for g, b in ((gain, bias), (gain, None), (None, None)):
        y = kc.fresh((5, 2, width), dtype)
        args = kc.LayerNormArgs(
            rows=5, heads=2, width=width, x=kc.view(x, 2 * width), y=kc.view(y, 2 * width),
            gain=kc.pointer(g), bias=kc.pointer(b), eps=1e-2,
        )  # fmt: skip
        kc.run(level, "layer_norm", args, threads=2)
        v = kc.value(x)
        d = v - v.mean(axis=-1, keepdims=True)
        expected = d / np.sqrt((d * d).mean(axis=-1, keepdims=True) + 1e-2)
        expected = expected * (kc.value(g) if g is not None else 1.0)
        close(y, expected + (kc.value(b) if b is not None else 0.0), scale=8)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("act", [silu, gelu, gelu_tanh])
def test_glu(level: str, width: int, act: object, dtype: int, rng: np.random.Generator) -> None:
    code = [silu, gelu, gelu_tanh].index(act)  # type: ignore[arg-type]
    x = kc.stored(rng.standard_normal((20, 2 * width)) * 3, dtype)
    outs = []
    for rows, threads in ((20, 1), (20, 3), (1, 2), (3, 2)):
        y = kc.fresh((rows, width), dtype)
        args = kc.GluArgs(rows=rows, width=width, x=kc.view(x), y=kc.view(y), act=code)
        kc.run(level, "glu", args, threads=threads)
        assert not np.isnan(kc.value(y)).any()
        outs.append(y)
    v = kc.value(x)
    close(outs[0], act(v[:, :width]) * v[:, width:], scale=4)  # type: ignore[operator]
    assert all((y == outs[0][: len(y)]).all() for y in outs)


def rotated(x: np.ndarray, table: np.ndarray, interleaved: bool) -> np.ndarray:
    """x [rows, heads, dim], table [rows, rotary]."""
    half = table.shape[1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    y = x.copy()
    a, b = (
        (x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2])
        if interleaved
        else (x[..., :half], x[..., half : 2 * half])
    )
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        y[..., 0 : 2 * half : 2], y[..., 1 : 2 * half : 2] = first, second
    else:
        y[..., :half], y[..., half : 2 * half] = first, second
    return y


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (80, 32), (96, 96), (20, 6)])
def test_rope(
    level: str, dims: tuple[int, int], interleaved: bool, dtype: int, rng: np.random.Generator
) -> None:
    dim, rotary = dims
    rows, heads = 7, (4, 2)
    qkv = kc.stored(rng.standard_normal((rows, sum(heads) * dim + 5)), dtype)
    table = rng.standard_normal((50, rotary)).astype(np.float32)
    positions = rng.integers(0, 50, rows).astype(np.int32)
    expected = [
        rotated(kc.value(part).reshape(rows, -1, dim), table[positions].astype(float), interleaved)
        for part in (qkv[:, : 4 * dim], qkv[:, 4 * dim : 6 * dim])
    ]
    outs = [kc.fresh((rows, h * dim), dtype) for h in heads]
    k_part, wide = qkv[:, 4 * dim :], qkv.shape[1]
    for q_out, k_out in (outs, (qkv, k_part)):  # apart, then in place
        args = kc.RopeArgs(
            rows=rows, q_heads=4, k_heads=2, head_dim=dim, rotary_dim=rotary,
            interleaved=interleaved, q=kc.view(qkv), k=kc.view(k_part, wide),
            q_out=kc.view(q_out), k_out=kc.view(k_out), positions=kc.pointer(positions),
            table=kc.pointer(table), table_stride=rotary,
        )  # fmt: skip
        kc.run(level, "rope", args, threads=2)
        close(q_out[:, : 4 * dim], expected[0].reshape(rows, -1), scale=3)
        close(k_out[:, : 2 * dim], expected[1].reshape(rows, -1), scale=3)
    assert (outs[0] == qkv[:, : 4 * dim]).all()


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
def test_embedding_of_both_layouts(
    level: str, width: int, dtype: int, rng: np.random.Generator
) -> None:
    table = rng.standard_normal((70, width))
    plain, packed = kc.stored(table, dtype), kc.pack_panels(table, dtype)
    ids = np.array([0, 69, 31, 32, 33, 5, 5], dtype=np.int32)
    for data, is_packed in ((plain, False), (packed, True)):
        y = kc.fresh((8, width), dtype)
        args = kc.EmbeddingArgs(
            rows=7, width=width, vocab=70, packed=is_packed,
            table=kc.View(data.ctypes.data, width, dtype), y=kc.view(y), ids=kc.pointer(ids),
        )  # fmt: skip
        kc.run(level, "embedding", args, threads=2)
        assert (y[:7] == plain[ids]).all()
        assert (y[7].view(np.uint8) == 0xFF).all()


@pytest.mark.parametrize("dtype", [kc.BF16, kc.F32, kc.I64, kc.BOOL])
def test_gather_rows(level: str, dtype: int, rng: np.random.Generator) -> None:
    x = kc.stored(rng.integers(0, 2, (9, 13)), dtype)
    index = np.array([8, 0, 0, 3], dtype=np.int32)
    y = kc.fresh((4, 13), dtype)
    args = kc.GatherRowsArgs(rows=4, width=13, x=kc.view(x), y=kc.view(y), index=kc.pointer(index))
    kc.run(level, "gather_rows", args, threads=3)
    assert (y == x[index]).all()

"""Elementwise ops, reductions and softmax over arbitrary strides, against numpy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from support import kernel_calls as kc

Function = Callable[..., np.ndarray]

UNARY: dict[str, Function] = {
    "copy": lambda x: x,
    "neg": np.negative,
    "exp": np.exp,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "cos": np.cos,
    "sin": np.sin,
    "abs": np.abs,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}
BINARY: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
    "max": np.maximum,
    "min": np.minimum,
}


def unary(level: str, op: str, x: np.ndarray, y: np.ndarray, threads: int = 2) -> np.ndarray:
    args = kc.UnaryArgs(
        dims=y.ndim, shape=kc.shape_of(*y.shape), x=kc.strided(x), y=kc.strided(y),
        op=kc.UNARY.index(op),
    )  # fmt: skip
    kc.run(level, "unary", args, threads=threads)
    return y


def close(y: np.ndarray, expected: np.ndarray) -> None:
    tolerance = 2.0**-8 if y.dtype == np.uint16 else 1e-6
    np.testing.assert_allclose(kc.value(y), expected, rtol=tolerance, atol=tolerance / 2)


@pytest.mark.parametrize("op", UNARY)
@pytest.mark.parametrize("dtype", [kc.BF16, kc.F32], ids=["bf16", "f32"])
def test_unary(level: str, op: str, dtype: int, rng: np.random.Generator) -> None:
    base = rng.standard_normal((5, 3, 37)) * 4
    x = kc.stored(np.abs(base) + 0.1 if "sqrt" in op else base, dtype)
    expected = UNARY[op](kc.value(x))
    straight = unary(level, op, x, kc.fresh(x.shape, dtype))
    close(straight, expected)
    # the same elements through transposed views and one long row: the same bits
    turned = unary(level, op, x.T, kc.fresh(x.T.shape, dtype))
    assert (turned == straight.T).all()
    flat = unary(level, op, x.reshape(1, -1), kc.fresh((1, x.size), dtype), threads=3)
    assert (flat.ravel() == straight.ravel()).all()


def test_functions_at_the_edges(level: str) -> None:
    edges = [0.0, -0.0, 1e-30, 88.0, -88.0, -103.0, 200.0, -200.0, np.inf, -np.inf, np.nan]
    x = np.array(edges, np.float32)
    for op in ("exp", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "relu"):
        with np.errstate(all="ignore"):
            expected = UNARY[op](x.astype(np.float64)).astype(np.float32)
        if op in ("silu", "gelu", "gelu_tanh"):
            expected[9] = np.nan  # -inf * 0
        got = unary(level, op, x, kc.fresh(x.shape, kc.F32))
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-37, err_msg=op)


@pytest.mark.parametrize("to", [kc.F32, kc.BF16, kc.F16])
@pytest.mark.parametrize("source", [kc.F32, kc.BF16, kc.F16, kc.I32, kc.I64, kc.BOOL])
def test_cast(level: str, source: int, to: int, rng: np.random.Generator) -> None:
    spread = rng.standard_normal(40) * 10.0 ** rng.integers(-9, 5, 40)
    with np.errstate(over="ignore"):
        x = kc.stored(np.concatenate([spread, [0, 65519, 65520, 6e-8]]), source)
        expected = kc.stored(kc.value(x).astype(np.float32), to)
    got = unary(level, "copy", x, kc.fresh(x.shape, to))
    np.testing.assert_array_equal(got, expected)


def test_copy_keeps_large_integers_and_bits(level: str) -> None:
    x = np.array([2**62 + 1, -(2**62) - 3, 7], np.int64)
    assert (unary(level, "copy", x, kc.fresh(x.shape, kc.I64)) == x).all()
    assert (unary(level, "copy", x[2:], kc.fresh((1,), kc.I32)) == 7).all()
    odd_nan = np.array([0x7F812345, 0xFFC00001], np.uint32).view(np.float32)
    got = unary(level, "copy", odd_nan, kc.fresh((2,), kc.F32))
    assert (got.view(np.uint32) == odd_nan.view(np.uint32)).all()


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("dtype", [kc.BF16, kc.F32], ids=["bf16", "f32"])
def test_binary_broadcasts(level: str, op: str, dtype: int, rng: np.random.Generator) -> None:
    base = rng.standard_normal((4, 5, 19))
    a = kc.stored(np.abs(base) + 0.1 if op == "pow" else base, dtype)
    for shape in ((4, 5, 19), (1, 5, 19), (4, 1, 1), (1, 1, 19), (4, 5, 1)):
        b = kc.stored(rng.standard_normal(shape) + 0.2, dtype)
        y = kc.fresh(a.shape, dtype)
        args = kc.BinaryArgs(
            dims=3, shape=kc.shape_of(*a.shape), a=kc.strided(a),
            b=kc.strided(np.broadcast_to(b, a.shape)), y=kc.strided(y), op=kc.BINARY.index(op),
        )  # fmt: skip
        kc.run(level, "binary", args, threads=2)
        close(y, BINARY[op](kc.value(a), kc.value(b)))
    y = kc.fresh(a.shape, dtype)
    args = kc.BinaryArgs(
        dims=3, shape=kc.shape_of(*a.shape), a=kc.strided(a), y=kc.strided(y), scalar=2.0,
        op=kc.BINARY.index(op),
    )  # fmt: skip
    kc.run(level, "binary", args, threads=2)
    close(y, BINARY[op](kc.value(a), 2.0))


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_reduce(level: str, op: str, rng: np.random.Generator) -> None:
    x = kc.stored(rng.standard_normal((3, 4, 37)), kc.F32)
    for axes in ((2,), (0,), (1, 2), (0, 2), (0, 1, 2)):
        kept = [d for d in range(3) if d not in axes]
        turned = x.transpose(*kept, *axes)
        y = kc.fresh(tuple(x.shape[d] for d in kept) or (1,), kc.F32)
        args = kc.ReduceArgs(
            dims=len(kept), reduced=len(axes), shape=kc.shape_of(*turned.shape),
            x=kc.strided(turned), y=kc.strided(y), op=["sum", "mean"].index(op),
        )  # fmt: skip
        kc.run(level, "reduce", args, threads=2)
        expected = getattr(np, op)(kc.value(x), axis=axes)
        np.testing.assert_allclose(y.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [kc.BF16, kc.F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_softmax(level: str, axis: int, dtype: int, rng: np.random.Generator) -> None:
    x = kc.stored(rng.standard_normal((3, 35, 9)) * 20, dtype)
    y = kc.fresh(x.shape, dtype)
    turned = np.moveaxis(x, axis, -1)
    args = kc.SoftmaxArgs(
        dims=3, shape=kc.shape_of(*turned.shape), x=kc.strided(turned),
        y=kc.strided(np.moveaxis(y, axis, -1)),
    )  # fmt: skip
    kc.run(level, "softmax", args, threads=2)
    v = kc.value(x)
    e = np.exp(v - v.max(axis=axis, keepdims=True))
    close(y, e / e.sum(axis=axis, keepdims=True))

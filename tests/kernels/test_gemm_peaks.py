"""Peaks of a GEMM's rows against numpy's argmax, and the rows that are then left unwritten."""

from __future__ import annotations

import numpy as np
import pytest
from support import kernel_calls as kc

PEAK = np.dtype([("value", "<f4"), ("index", "<i4"), ("bad", "<i4")])


def _run(
    level: str,
    x: np.ndarray,
    weight: np.ndarray,
    *,
    threads: int = 1,
    bias: np.ndarray | None = None,
    only: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """y f32 [rows, n], NaN where nothing was written, and the parts of the peaks."""
    rows, (n, k) = len(x), weight.shape
    packed, x = kc.pack_panels(weight, kc.BF16), kc.stored(x, kc.BF16)
    bias = None if bias is None else kc.stored(bias, kc.BF16)
    y, peaks = kc.fresh((rows, n), kc.F32), np.zeros((threads, rows), PEAK)
    args = kc.GemmArgs(
        rows=rows, n=n, k=k, x=kc.view(x), y=kc.view(y), add=kc.view(None),
        weight=kc.pointer(packed), bias=kc.pointer(bias), peaks=peaks.ctypes.data,
        peak_only=kc.pointer(only),
    )  # fmt: skip
    kc.run(level, "gemm", args, threads=threads)
    return y, peaks


def _merged(parts: np.ndarray) -> np.ndarray:
    """The lowest index of the largest value: parts lie in the order of the columns."""
    best = np.argmax(parts["value"], axis=0)
    return parts[best, np.arange(parts.shape[1])]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(1, 31, 8), (5, 96, 64), (33, 500, 40), (40, 1, 3)])
def test_peaks_are_the_argmax_of_what_is_written(
    level: str, shape: tuple[int, int, int], threads: int, bias: bool, rng: np.random.Generator
) -> None:
    rows, n, k = shape
    x, w = rng.standard_normal((rows, k)), rng.standard_normal((n, k))
    b = rng.standard_normal(n) if bias else None
    y, parts = _run(level, x, w, threads=threads, bias=b)
    assert np.isfinite(y).all()
    found = _merged(parts)
    assert (found["index"] == y.argmax(axis=1)).all()
    assert (found["value"] == y.max(axis=1)).all()
    assert not parts["bad"].any()


@pytest.mark.parametrize("threads", [1, 2])
def test_equal_logits_go_to_the_lower_id(level: str, threads: int) -> None:
    w = np.zeros((200, 4))
    w[[70, 71, 130, 199]] = 1.0
    _, parts = _run(level, np.ones((2, 4)), w, threads=threads)
    assert _merged(parts)["index"].tolist() == [70, 70]


def test_only_the_marked_rows_are_left_out(level: str, rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((6, 32)), rng.standard_normal((75, 32))
    whole, _ = _run(level, x, w, threads=2)
    only = np.array([1, 0, 1, 1, 0, 0], np.uint8)
    y, parts = _run(level, x, w, threads=2, only=only)
    assert np.isnan(y[only == 1]).all()
    assert (y[only == 0] == whole[only == 0]).all()
    assert (_merged(parts)["index"] == whole.argmax(axis=1)).all()


@pytest.mark.parametrize("column", [0, 40, 74])
@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_what_is_no_number_is_marked(
    level: str, fault: float, column: int, rng: np.random.Generator
) -> None:
    """Wherever it stands, also after a larger number; a -inf alone is none."""
    x, w = np.ones((3, 8)), rng.standard_normal((75, 8))
    b = np.zeros(75)
    b[10], b[column], b[41] = 1e30, fault, -np.inf
    _, parts = _run(level, x, w, threads=2, bias=b)
    assert (parts["bad"].max(axis=0) == 1).all()
    b[column] = -np.inf
    _, parts = _run(level, x, w, threads=2, bias=b)
    assert not parts["bad"].any()

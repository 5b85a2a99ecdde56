"""gemm against float64, and its contract: bits that depend on nothing but the row."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import pytest
from support import kernel_calls as kc


@dataclass
class Case:
    """One linear with random operands; `run` calls the kernel on some of its rows."""

    rng: np.random.Generator
    n: int
    k: int
    dtype: int
    rows: int = 40
    bias: bool = False
    x: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.x = kc.stored(self.rng.standard_normal((self.rows, self.k)), self.dtype)
        w = self.rng.standard_normal((self.n, self.k)) / np.sqrt(self.k)
        self.w = kc.value(kc.stored(w, self.dtype))
        self.packed = kc.pack_panels(w, self.dtype)
        self.b = kc.stored(self.rng.standard_normal(self.n), self.dtype) if self.bias else None

    def run(
        self,
        level: str,
        rows: slice = slice(None),
        *,
        threads: int = 1,
        out: int = kc.F32,
        add: np.ndarray | None = None,
        norm: kc.RmsNormArgs | None = None,
    ) -> np.ndarray:
        """y of the given rows; y's buffer has a NaN row on either side and NaN between rows."""
        x = self.x[rows]
        y = kc.fresh((len(x) + 2, self.n + 3), out)
        args = kc.GemmArgs(
            rows=len(x), n=self.n, k=self.k, x=kc.view(x), y=kc.view(y[1:]), add=kc.view(add),
            weight=kc.pointer(self.packed), bias=kc.pointer(self.b),
            norm=ctypes.pointer(norm) if norm else None,
        )  # fmt: skip
        kc.run(level, "gemm", args, threads=threads)
        assert (y[[0, -1]].view(np.uint8) == 0xFF).all(), "wrote a row that isn't there"
        assert (y[:, self.n :].copy().view(np.uint8) == 0xFF).all(), "wrote past the last column"
        return y[1:-1, : self.n].copy()

    def exact(self) -> np.ndarray:
        """float64 result, bias included."""
        y = kc.value(self.x) @ self.w.T
        return y if self.b is None else y + kc.value(self.b)


SHAPES = [(1, 1), (16, 32), (32, 31), (33, 64), (100, 70), (96, 200), (160, 577)]


@pytest.mark.parametrize("dtype", [kc.BF16, kc.F32], ids=["bf16", "f32"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_matches_float64(level: str, n: int, k: int, dtype: int, rng: np.random.Generator) -> None:
    case = Case(rng, n, k, dtype, bias=True)
    for rows in (1, 2, 5, 13, 16, 17, 33, 40):
        y = case.run(level, slice(0, rows), threads=2)
        np.testing.assert_allclose(y, case.exact()[:rows], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [kc.BF16, kc.F32], ids=["bf16", "f32"])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (96, 576), (70, 75)])
def test_bits_depend_on_the_row_alone(
    level: str, n: int, k: int, dtype: int, rng: np.random.Generator
) -> None:
    """Whatever the number of rows, their place among the others and the number of threads."""
    case = Case(rng, n, k, dtype, rows=300)
    whole = case.run(level, threads=1)
    for rows in (1, 3, 7, 8, 9, 15, 31, 32, 47, 100):
        for start in (0, 5, 200):
            for threads in (1, 2, 3, 5):
                part = case.run(level, slice(start, start + rows), threads=threads)
                assert (part.view(np.uint32) == whole[start : start + rows].view(np.uint32)).all()


def test_many_rows_in_chunks(level: str, rng: np.random.Generator) -> None:
    """More packed rows than fit the chunk: 192 rows of 4,000 f32 are 3 MB."""
    case = Case(rng, 40, 4000, kc.F32, rows=500)
    y = case.run(level, threads=2)
    np.testing.assert_allclose(y, case.exact(), rtol=1e-4, atol=1e-4)
    single = case.run(level, slice(321, 322))
    assert (single.view(np.uint32) == y[321:322].view(np.uint32)).all()


@pytest.mark.parametrize("k", [769, 1024, 1536, 1600])
def test_deep_panels_in_parts(level: str, k: int, rng: np.random.Generator) -> None:
    """bf16 rows that are many enough to take k in parts: exact, and the bits of one row alone."""
    case = Case(rng, 75, k, kc.BF16, rows=300, bias=True)
    y = case.run(level, threads=2)
    np.testing.assert_allclose(y, case.exact(), rtol=2e-5, atol=2e-5)
    for rows in (slice(0, 1), slice(40, 73), slice(200, 296)):
        part = case.run(level, rows, threads=3)
        assert (part.view(np.uint32) == y[rows].view(np.uint32)).all()


def test_rounds_to_bf16_once_and_adds_after_rounding(level: str, rng: np.random.Generator) -> None:
    case = Case(rng, 75, 96, kc.BF16, bias=True)
    full = case.run(level, threads=2)
    assert (case.run(level, threads=2, out=kc.BF16) == kc.to_bf16(full)).all()
    add = kc.stored(rng.standard_normal((40, 80)), kc.BF16)
    summed = kc.from_bf16(kc.to_bf16(full)) + kc.from_bf16(add[:, :75])
    assert (case.run(level, threads=2, out=kc.BF16, add=add) == kc.to_bf16(summed)).all()


def test_other_rows_may_hold_nan(level: str, rng: np.random.Generator) -> None:
    case = Case(rng, 64, 96, kc.BF16)
    clean = case.run(level)
    case.x[3] = 0x7FC0
    dirty = case.run(level, threads=2)
    assert np.isnan(dirty[3]).all()
    keep = np.arange(40) != 3
    assert (dirty[keep] == clean[keep]).all()


@pytest.mark.parametrize("dtype", [kc.BF16, kc.F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("k", [64, 75])
@pytest.mark.parametrize("residual", [False, True])
def test_norm_in_the_prologue_equals_norm_then_gemm(
    level: str, k: int, dtype: int, residual: bool, rng: np.random.Generator
) -> None:
    for rows in (1, 8, 9, 40):
        case = Case(rng, 70, k, dtype, rows=rows)
        gain = kc.stored(rng.standard_normal(k), dtype)
        other = kc.stored(rng.standard_normal((rows, k)), dtype) if residual else None
        sums = [kc.fresh((rows, k), dtype) for _ in range(2)]
        normed = kc.fresh((rows, k), dtype)
        norms = [
            kc.RmsNormArgs(
                rows=rows, heads=1, width=k, x=kc.view(case.x), residual=kc.view(other),
                sum=kc.view(total if residual else None), y=kc.view(normed),
                gain=kc.pointer(gain), eps=1e-5, offset=1.0,
            )
            for total in sums
        ]  # fmt: skip
        fused = [case.run(level, threads=t, norm=norms[0]) for t in (1, 2, 3)]
        kc.run(level, "rms_norm", norms[1])
        case.x = normed
        apart = case.run(level)
        assert all((f == apart).all() for f in fused)
        assert not np.isnan(apart).any()
        if residual:
            assert (sums[0] == sums[1]).all()


@pytest.mark.parametrize("dtype", [kc.BF16, kc.F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("act", [0, 1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_glu_in_the_epilogue_equals_gemm_then_glu(
    level: str, act: int, bias: bool, dtype: int, rng: np.random.Generator
) -> None:
    """Bit for bit, for three panels of outputs shared by one to five threads."""
    width = 96
    case = Case(rng, 2 * width, 70, dtype, rows=45, bias=bias)
    both = case.run(level, out=dtype)
    beside = case.w.reshape(2, width // 16, 16, 70).swapaxes(0, 1).reshape(2 * width, 70)
    packed = kc.pack_panels(beside, dtype)
    for rows in (1, 9, 45):
        apart = kc.fresh((rows, width), dtype)
        glu = kc.GluArgs(rows=rows, width=width, x=kc.view(both), y=kc.view(apart), act=act)
        kc.run(level, "glu", glu)
        for threads in (1, 2, 5):
            fused = kc.fresh((rows + 1, width), dtype)
            args = kc.GemmArgs(
                rows=rows, n=2 * width, k=70, x=kc.view(case.x), y=kc.view(fused),
                weight=kc.pointer(packed), bias=kc.pointer(case.b), epilogue=act + 1,
            )  # fmt: skip
            kc.run(level, "gemm", args, threads=threads)
            assert (fused[:rows] == apart).all()
            assert (fused[rows].view(np.uint8) == 0xFF).all()

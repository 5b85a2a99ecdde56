"""Calls single native kernels: the structs of runtime/kernels/kernels.h, mirrored in ctypes.

bf16 matrices are numpy uint16 arrays; `to_bf16` rounds to nearest even, `from_bf16` widens.
Buffers are made by `fresh`, which fills them with NaN, so what a kernel leaves unwritten shows.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import c_bool, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

import ropeway.runtime

F32, BF16, F16, I32, I64, BOOL = range(6)
PANEL = 32
MAX_DIMS = 6
_NUMPY = {
    F32: np.float32,
    BF16: np.uint16,
    F16: np.float16,
    I32: np.int32,
    I64: np.int64,
    BOOL: np.bool_,
}
UNARY = [
    "copy", "neg", "exp", "rsqrt", "sqrt", "cos", "sin", "abs", "silu", "gelu", "gelu_tanh", "relu",
    "tanh", "sigmoid",
]  # fmt: skip
BINARY = ["add", "sub", "mul", "div", "pow", "max", "min"]


class View(ctypes.Structure):
    """A matrix of rows, `stride` elements apart."""

    _fields_ = [("data", c_void_p), ("stride", c_int64), ("dtype", c_int32)]


class RmsNormArgs(ctypes.Structure):
    """rms_norm, and the prologue of gemm."""

    _fields_ = [
        ("rows", c_int64), ("heads", c_int64), ("width", c_int64), ("x", View),
        ("residual", View), ("sum", View), ("y", View), ("gain", c_void_p), ("eps", c_float),
        ("offset", c_float),
    ]  # fmt: skip


class LayerNormArgs(ctypes.Structure):
    """layer_norm."""

    _fields_ = [
        ("rows", c_int64), ("heads", c_int64), ("width", c_int64), ("x", View), ("y", View),
        ("gain", c_void_p), ("bias", c_void_p), ("eps", c_float),
    ]  # fmt: skip


class GemmArgs(ctypes.Structure):
    """gemm."""

    _fields_ = [
        ("rows", c_int64), ("n", c_int64), ("k", c_int64), ("x", View), ("y", View),
        ("add", View), ("weight", c_void_p), ("bias", c_void_p),
        ("norm", ctypes.POINTER(RmsNormArgs)), ("epilogue", c_int32), ("peaks", c_void_p),
        ("peak_only", c_void_p),
    ]  # fmt: skip


class GluArgs(ctypes.Structure):
    """glu."""

    _fields_ = [("rows", c_int64), ("width", c_int64), ("x", View), ("y", View), ("act", c_int32)]


class RopeArgs(ctypes.Structure):
    """rope."""

    _fields_ = [
        ("rows", c_int64), ("q_heads", c_int32), ("k_heads", c_int32), ("head_dim", c_int32),
        ("rotary_dim", c_int32), ("interleaved", c_bool), ("q", View), ("k", View),
        ("q_out", View), ("k_out", View), ("positions", c_void_p), ("table", c_void_p),
        ("table_stride", c_int64),
    ]  # fmt: skip


class EmbeddingArgs(ctypes.Structure):
    """embedding."""

    _fields_ = [
        ("rows", c_int64), ("width", c_int64), ("vocab", c_int64), ("packed", c_bool),
        ("table", View), ("y", View), ("ids", c_void_p),
    ]  # fmt: skip


class GatherRowsArgs(ctypes.Structure):
    """gather_rows."""

    _fields_ = [
        ("rows", c_int64), ("width", c_int64), ("x", View), ("y", View), ("index", c_void_p),
    ]  # fmt: skip


class Strided(ctypes.Structure):
    """An operand with a stride per dim."""

    _fields_ = [("data", c_void_p), ("dtype", c_int32), ("stride", c_int64 * MAX_DIMS)]


class UnaryArgs(ctypes.Structure):
    """unary."""

    _fields_ = [
        ("dims", c_int32), ("shape", c_int64 * MAX_DIMS), ("x", Strided), ("y", Strided),
        ("op", c_int32),
    ]  # fmt: skip


class BinaryArgs(ctypes.Structure):
    """binary."""

    _fields_ = [
        ("dims", c_int32), ("shape", c_int64 * MAX_DIMS), ("a", Strided), ("b", Strided),
        ("y", Strided), ("scalar", c_float), ("op", c_int32),
    ]  # fmt: skip


class ReduceArgs(ctypes.Structure):
    """reduce."""

    _fields_ = [
        ("dims", c_int32), ("reduced", c_int32), ("shape", c_int64 * MAX_DIMS), ("x", Strided),
        ("y", Strided), ("op", c_int32),
    ]  # fmt: skip


class SoftmaxArgs(ctypes.Structure):
    """softmax."""

    _fields_ = [("dims", c_int32), ("shape", c_int64 * MAX_DIMS), ("x", Strided), ("y", Strided)]


class CachePlane(ctypes.Structure):
    """One plane of a layer's cache."""

    _fields_ = [("data", c_void_p), ("block_stride", c_int64)]


class KvWriteArgs(ctypes.Structure):
    """kv_write."""

    _fields_ = [
        ("tokens", c_int64), ("kv_heads", c_int32), ("head_dim", c_int32),
        ("v_head_dim", c_int32), ("dtype", c_int32), ("k", View), ("v", View),
        ("k_cache", CachePlane), ("v_cache", CachePlane), ("slots", c_void_p),
    ]  # fmt: skip


class AttentionArgs(ctypes.Structure):
    """attention."""

    _fields_ = [
        ("tokens", c_int64), ("requests", c_int64), ("heads", c_int32), ("kv_heads", c_int32),
        ("head_dim", c_int32), ("v_head_dim", c_int32), ("dtype", c_int32), ("scale", c_float),
        ("softcap", c_float), ("window", c_int32), ("q", View), ("y", View),
        ("k_cache", CachePlane), ("v_cache", CachePlane), ("block_table", c_void_p),
        ("table_stride", c_int64), ("query_start", c_void_p), ("lengths", c_void_p),
    ]  # fmt: skip


class Reading(ctypes.Structure):
    """read_sum, the bandwidth probe."""

    _fields_ = [("data", c_void_p), ("bytes", c_int64)]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The package's native library (ROPEWAY_KERNELS: another build of it), or None without one."""
    built = Path(ropeway.runtime.__file__).parent.glob("_kernels*.so")
    found = [os.environ["ROPEWAY_KERNELS"]] if "ROPEWAY_KERNELS" in os.environ else sorted(built)
    if not found:
        return None
    lib = ctypes.CDLL(str(found[0]))
    lib.ropeway_kernel_levels.restype = ctypes.c_char_p
    lib.ropeway_kernel_run.restype = ctypes.c_double
    lib.ropeway_kernel_run.argtypes = [
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, c_void_p, c_int64, c_int64, c_int64,
        ctypes.c_int,
    ]  # fmt: skip
    lib.ropeway_checksum_words.restype = ctypes.c_uint64
    lib.ropeway_checksum_words.argtypes = [c_void_p, ctypes.c_uint64, ctypes.c_uint64]
    return lib


def levels() -> list[str]:
    """Instruction-set levels of this machine, best first."""
    lib = library()
    return lib.ropeway_kernel_levels().decode().split(",") if lib else []


def run(
    level: str,
    kernel: str,
    args: Any,
    *,
    threads: int = 1,
    max_length: int = 32768,
    repeats: int = 1,
) -> float:
    """Runs a struct, or a list of structs one after the other; returns the best time in seconds."""
    calls = args if isinstance(args, list) else [args]
    array = (type(calls[0]) * len(calls))(*calls)
    lib = library()
    if lib is None:
        raise RuntimeError("the native kernels are not built")
    seconds = lib.ropeway_kernel_run(
        level.encode(), kernel.encode(), threads, ctypes.addressof(array),
        ctypes.sizeof(type(calls[0])), len(calls), max_length, repeats,
    )  # fmt: skip
    if seconds < 0:
        raise RuntimeError(f"{kernel} on {level} refused: {seconds}")
    return float(seconds)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float -> bf16 bits, to nearest even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    """bf16 bits -> float32."""
    return (x.astype(np.uint32) << 16).view(np.float32)


def stored(x: np.ndarray, dtype: int) -> np.ndarray:
    """float -> the array that a kernel reads."""
    return to_bf16(x) if dtype == BF16 else np.ascontiguousarray(x, dtype=_NUMPY[dtype])


def value(x: np.ndarray) -> np.ndarray:
    """The float64 values of a stored array."""
    return (from_bf16(x) if x.dtype == np.uint16 else x).astype(np.float64)


def fresh(shape: tuple[int, ...], dtype: int) -> np.ndarray:
    """A buffer of NaN (of all ones, for integers)."""
    out = np.empty(shape, dtype=_NUMPY[dtype])
    out.view(np.uint8).fill(0xFF)
    return out


def aligned(shape: tuple[int, ...], dtype: int, align: int = 64) -> np.ndarray:
    """A zeroed array whose data starts at a multiple of `align` bytes."""
    item = np.dtype(_NUMPY[dtype]).itemsize
    size = int(np.prod(shape)) * item
    raw = np.zeros(size + align, dtype=np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + size].view(_NUMPY[dtype]).reshape(shape)


def view(x: np.ndarray | None, stride: int | None = None, dtype: int | None = None) -> View:
    """A View of a 2-d array (rows may be further apart than they are long)."""
    if x is None:
        return View(None, 0, F32)
    kind = dtype if dtype is not None else next(k for k, v in _NUMPY.items() if v == x.dtype)
    return View(x.ctypes.data, stride or x.strides[0] // x.itemsize, kind)


def pointer(x: np.ndarray | None) -> int | None:
    """Address of an array's data."""
    return None if x is None else x.ctypes.data


def strided(x: np.ndarray) -> Strided:
    """A Strided of any numpy view."""
    kind = next(k for k, v in _NUMPY.items() if v == x.dtype)
    steps = [s // x.itemsize for s in x.strides]
    return Strided(x.ctypes.data, kind, (c_int64 * MAX_DIMS)(*steps))


def shape_of(*sizes: int) -> Any:
    """The shape array of a strided op."""
    return (c_int64 * MAX_DIMS)(*sizes)


def pack_panels(w: np.ndarray, dtype: int) -> np.ndarray:
    """W[n, k] (floats) -> panel32, zero padded, 64-byte aligned."""
    n, k = w.shape
    np_, kp = -(-n // PANEL) * PANEL, -(-k // PANEL) * PANEL
    padded = np.zeros((np_, kp), dtype=np.float32)
    padded[:n, :k] = w
    panels = padded.reshape(np_ // PANEL, PANEL, kp)
    if dtype == BF16:
        pairs = to_bf16(panels).reshape(np_ // PANEL, PANEL, kp // 2, 2).transpose(0, 2, 1, 3)
    else:
        pairs = panels.transpose(0, 2, 1)
    out = aligned(pairs.shape, dtype)
    out[...] = pairs
    return out

"""Declares the native kernels; everything else is in pyproject.toml.

One shared library with a C ABI, loaded by ctypes. It is optional: without a C++17 compiler the
install goes through, and target `cpu` says what is missing. The floating-point flags are part of
the numerics contract: contraction is off, so a product and a sum fuse only where a kernel says so,
and every row of a matrix sees the same sequence of roundings.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup

_KERNELS = Path("runtime/kernels")
_WINDOWS = sys.platform == "win32"

setup(
    ext_modules=[
        Extension(
            "ropeway.runtime._kernels",
            sources=sorted(str(path) for path in _KERNELS.glob("*.cpp")),
            depends=sorted(str(path) for path in _KERNELS.glob("*.h")),
            language="c++",
            extra_compile_args=[]
            if _WINDOWS
            else [
                "-std=c++17",
                "-O3",
                "-g0",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fvisibility=hidden",
                "-Wall",
                "-Wextra",
                "-pthread",
            ],
            extra_link_args=[] if _WINDOWS else ["-pthread"],
            optional=True,
        )
    ]
)

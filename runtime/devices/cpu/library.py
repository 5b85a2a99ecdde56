"""Finds and loads the native kernels that the package's own build made."""

import ctypes
import functools
import importlib.machinery
import os
from pathlib import Path

from ropeway.compiler.errors import TargetError
from ropeway.compiler.targets.cpu.kernel_table import signatures
from ropeway.runtime.devices.cpu import records

_NEXT_STEP = (
    "install a C++17 compiler (Debian: apt install g++) and reinstall ropeway, or compile for "
    "target reference"
)


def library_path() -> Path | None:
    """Where the built library lies; None when the install had no compiler."""
    folder = Path(__file__).parents[2]
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_kernels{suffix}"
        if path.is_file():
            return path
    return None


@functools.cache
def load_library() -> ctypes.CDLL:
    """The native library, its functions typed.

    Raises TargetError when it wasn't built, doesn't load, or was built from other sources.
    """
    path = library_path()
    if path is None:
        raise TargetError(f"target cpu: the native kernels weren't built: {_NEXT_STEP}")
    try:
        library = ctypes.CDLL(str(path))
        records.declare(library)
    except (OSError, AttributeError) as error:
        raise TargetError(f"target cpu: {path.name} doesn't load ({error}): {_NEXT_STEP}") from None
    if library.rw_plan_signatures().decode() != signatures() or not records.sizes_match(library):
        raise TargetError(
            f"target cpu: {path.name} was built from other sources than this package: reinstall "
            f"ropeway"
        )
    return library


def available_isas() -> list[str]:
    """Instruction sets that this machine and this build run, best first."""
    return [isa for isa in load_library().rw_available_kernels().decode().split(",") if isa]


def chosen_isa(name: str | None = None) -> str:
    """The instruction set that kernels will use; `name` or $ROPEWAY_ISA forces one.

    Raises TargetError when this machine lacks the forced one.
    """
    found = load_library().rw_select_kernels(name.encode() if name else None)
    if found is None:
        wanted = name or os.environ.get("ROPEWAY_ISA", "")
        raise TargetError(
            f"target cpu: instruction set {wanted!r} isn't available here: use one of "
            f"{', '.join(available_isas())}"
        )
    isa: str = found.decode()
    return isa

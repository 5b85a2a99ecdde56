"""The identity of a module: the sha256 of its canonical text."""

import hashlib

from ropeway.compiler.ir.graph import Module
from ropeway.compiler.ir.printer import print_module


def fingerprint(module: Module) -> str:
    """64 hex digits; equal exactly when the modules' texts are."""
    return hashlib.sha256(print_module(module).encode()).hexdigest()

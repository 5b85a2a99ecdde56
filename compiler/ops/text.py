"""IR text as people write it: defaults left out, then filled in and verified."""

from ropeway.compiler.ir.graph import Module
from ropeway.compiler.ir.parser import parse_module
from ropeway.compiler.ops import registry
from ropeway.compiler.ops.verifier import verify


def read_module(text: str, what: str = "module") -> Module:
    """Parses, fills default attributes and verifies. Raises IRSyntaxError or VerifyError."""
    module = parse_module(text, what)
    verify(module)
    for function in module.functions.values():
        for op in function.ops:
            registry.fill_defaults(op)
    return module

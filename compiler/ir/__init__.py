"""The intermediate representation: flat SSA functions over symbolic shapes, and its text.

The names below are loaded on first use, so that `import ropeway.compiler.ir` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ropeway.compiler.ir.attrs import Attr
    from ropeway.compiler.ir.dims import (
        Dim,
        parse_dim,
        print_dim,
        same,
        substitute,
        symbol,
    )
    from ropeway.compiler.ir.graph import Function, Input, Module, Op, Operand, Value
    from ropeway.compiler.ir.parser import parse_module, parse_type
    from ropeway.compiler.ir.printer import print_function, print_module, print_op
    from ropeway.compiler.ir.rewrite import Rewriter
    from ropeway.compiler.ir.types import CacheType, DType, Plane, TensorType, Type
    from ropeway.compiler.ir.weights import Apply, Ckpt, Const, Weight, WeightExpr, apply

_HOMES = {
    "attrs": ("Attr",),
    "dims": ("Dim", "parse_dim", "print_dim", "same", "substitute", "symbol"),
    "graph": ("Function", "Input", "Module", "Op", "Operand", "Value"),
    "parser": ("parse_module", "parse_type"),
    "printer": ("print_function", "print_module", "print_op"),
    "rewrite": ("Rewriter",),
    "types": ("CacheType", "DType", "Plane", "TensorType", "Type"),
    "weights": ("Apply", "Ckpt", "Const", "Weight", "WeightExpr", "apply"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Apply",
    "Attr",
    "CacheType",
    "Ckpt",
    "Const",
    "DType",
    "Dim",
    "Function",
    "Input",
    "Module",
    "Op",
    "Operand",
    "Plane",
    "Rewriter",
    "TensorType",
    "Type",
    "Value",
    "Weight",
    "WeightExpr",
    "apply",
    "parse_dim",
    "parse_module",
    "parse_type",
    "print_dim",
    "print_function",
    "print_module",
    "print_op",
    "same",
    "substitute",
    "symbol",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)

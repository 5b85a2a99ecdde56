"""Where in the model's source a traced node comes from, and how to name it to a person."""

import re
import sys
from functools import cache
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)
_FRONTEND = str(Path(__file__).resolve().parents[1])


def location(node: fx.Node) -> str:
    """`models/llama.py:88`: the innermost line of model source, "" if unknown.

    Paths are short and relative, so that the same model gives the same text on every machine.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for path, line in reversed(frames):
        if not path.startswith((_FRONTEND, _TORCH)):
            return f"{_short(path)}:{line}"
    return ""


def describe(node: fx.Node) -> str:
    """The op and its source line, for errors: `aten.roll.default (models/x.py:12)`."""
    where = location(node)
    return f"{node.target} ({where})" if where else str(node.target)


def module_path(node: fx.Node) -> str:
    """The dotted path of the submodule that a node runs in, without the trace's own wrapper."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()), ("",))[0] if stack else ""
    return str(path).removeprefix("model_").removeprefix(".")


@cache
def _short(path: str) -> str:
    file = Path(path)
    if "site-packages" in file.parts:
        return "/".join(file.parts[file.parts.index("site-packages") + 1 :])
    root = Path(__file__).resolve().parents[3]
    for base in (root, *(Path(entry).resolve() for entry in sys.path if entry)):
        if file.is_relative_to(base) and base != Path(base.anchor):
            return file.relative_to(base).as_posix()
    return "/".join(file.parts[-2:])

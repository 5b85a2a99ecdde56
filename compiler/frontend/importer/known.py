"""Evaluation of the part of a graph that doesn't depend on tokens: constants, positions, masks.

A known value is evaluated with real buffers at a concrete length. Casts to bf16 and f16 are taken
as f32, so that tables keep full precision whatever dtype is compiled for.
"""

from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx

from ropeway.compiler.errors import ImportModelError
from ropeway.compiler.frontend.importer.locations import describe
from ropeway.compiler.frontend.importer.rotary import evaluate_position_module
from ropeway.compiler.frontend.importer.trace import TracedModel

_NARROW = (torch.bfloat16, torch.float16)


class KnownGraph:
    """Evaluates nodes whose inputs are buffers, constants and the length only."""

    def __init__(self, traced: TracedModel) -> None:
        self._traced = traced
        self._order = {node: index for index, node in enumerate(traced.graph.nodes)}
        self._mutations = self._find_mutations()
        self._length = sympy.Symbol(traced.length, positive=True, integer=True)

    def _find_mutations(self) -> dict[fx.Node, list[fx.Node]]:
        """Buffer placeholder -> nodes that write into it in place."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self._traced.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            if node.op != "call_function" or schema is None or not schema.is_mutable:
                continue
            target = node.args[0]
            if isinstance(target, fx.Node) and target.op == "placeholder":
                found.setdefault(target, []).append(node)
        return found

    def closure(self, node: fx.Node) -> list[fx.Node]:
        """Every node that `node` needs, itself included, in graph order."""
        wanted: set[fx.Node] = set()
        stack = [node]
        while stack:
            current = stack.pop()
            if current in wanted:
                continue
            wanted.add(current)
            if not self._is_size(current):
                stack.extend(current.all_input_nodes)
            at = self._order[current]
            for source in current.all_input_nodes:
                writes = self._mutations.get(source, ())
                stack.extend(write for write in writes if self._order[write] < at)
        return sorted(wanted, key=self._order.__getitem__)

    def evaluate(self, node: fx.Node, length: int) -> Any:
        """The node's value when the sequence has `length` tokens."""
        env: dict[fx.Node, Any] = {}
        nodes = self.closure(node)
        last_use = {source: step for step in nodes for source in step.all_input_nodes}
        with torch.no_grad():
            for step in nodes:
                env[step] = self._run(step, env, length)
                for source in step.all_input_nodes:
                    if last_use.get(source) is step and source.op != "placeholder":
                        env.pop(source, None)
        return env[node]

    def size(self, value: Any, length: int) -> int:
        """A python int or symbolic size at a concrete length."""
        if isinstance(value, int):
            return value
        expression = value.node.expr
        symbols = {symbol: length for symbol in expression.free_symbols}
        return int(expression.subs(symbols))

    @staticmethod
    def _is_size(node: fx.Node) -> bool:
        return isinstance(node.meta.get("val"), torch.SymInt)

    def _run(self, node: fx.Node, env: dict[fx.Node, Any], length: int) -> Any:
        if self._is_size(node):
            return self.size(node.meta["val"], length)
        if node.op == "placeholder":
            return self._buffer(node)
        args = fx.map_arg(node.args, env.__getitem__)
        kwargs = fx.map_arg(node.kwargs, env.__getitem__)
        if str(node.target).startswith("ropeway.position_module"):
            positions, name, layer_type = args[0], str(args[1]), str(args[2])
            assert isinstance(positions, torch.Tensor)
            return evaluate_position_module(self._traced.opaque[name], positions, layer_type)
        args, kwargs = _widen(args), _widen(kwargs)
        try:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ImportModelError(
                f"{describe(node)} doesn't depend on tokens but can't be evaluated for a length of "
                f"{length}: {str(error).splitlines()[0]}"
            ) from error

    def _buffer(self, node: fx.Node) -> torch.Tensor:
        name, value = self._traced.buffers[node.name]
        if value is None:
            raise ImportModelError(
                f"buffer {name!r} has no value: it is on the meta device and isn't part of the "
                "checkpoint. Build the module with real buffers (parameters may stay on meta)"
            )
        wide = value.float() if value.dtype in _NARROW else value
        return wide.clone() if node in self._mutations else wide

    def numbers(self, nodes: Iterable[fx.Node]) -> set[int]:
        """Every integer that stands in the arguments of these nodes."""
        found: set[int] = set()
        for node in nodes:
            if node.op != "call_function" or self._is_size(node):
                continue
            stack: list[object] = [*node.args, *node.kwargs.values()]
            while stack:
                item = stack.pop()
                if isinstance(item, list | tuple):
                    stack.extend(item)
                elif isinstance(item, int | float) and not isinstance(item, bool):
                    found.add(int(item)) if abs(item) < 1 << 40 else None
        return found


def _widen(value: Any) -> Any:
    """bf16 and f16 dtypes in arguments become f32."""
    if isinstance(value, torch.dtype):
        return torch.float32 if value in _NARROW else value
    if isinstance(value, tuple | list):
        return type(value)(_widen(item) for item in value)
    if isinstance(value, dict):
        return {key: _widen(item) for key, item in value.items()}
    return value

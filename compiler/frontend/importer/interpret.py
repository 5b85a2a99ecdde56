"""The importer: an abstract interpretation of a traced graph.

Every fx value is one of: known (independent of tokens; kept as a node and evaluated when needed) or
a View over an IR operand. Known values never emit anything until a token value meets them.
"""

import operator
from typing import Any

import torch
from torch import fx

from ropeway.compiler.errors import ImportModelError, VerifyError
from ropeway.compiler.frontend.importer.build import TOKENS, Builder
from ropeway.compiler.frontend.importer.handlers import EMPTY, HANDLERS, IGNORED, view_of
from ropeway.compiler.frontend.importer.known import KnownGraph
from ropeway.compiler.frontend.importer.locations import describe
from ropeway.compiler.frontend.importer.trace import TracedModel
from ropeway.compiler.frontend.importer.view import View
from ropeway.compiler.ir.graph import Function, Module
from ropeway.compiler.ir.types import DType
from ropeway.compiler.ops.tensors import TensorSource


def import_graph(
    traced: TracedModel, name: str, max_length: int, source: TensorSource
) -> tuple[Module, dict[str, torch.Tensor]]:
    """The traced model as a module with one function @step, and its constants by name.

    The function maps ids and positions i32[T] to logits [T, V], with nn.sdpa over one sequence.
    Raises ImportModelError naming the op and its source line.
    """
    module = Module(name=name, dims={"T": (1, max_length)})
    function = Function("step")
    module.functions["step"] = function
    build = Builder(module, function, KnownGraph(traced), max_length)
    logits = _Interpreter(traced, build, source).run()
    function.outputs = [(_rows(build, logits), "logits")]
    return module, build.constants


def _rows(build: Builder, logits: View) -> Any:
    if not logits.tokens or logits.type.rank != 2 or logits.axes[-1] != 1:
        raise ImportModelError(
            f"the model returns {logits.type}; expected logits [1, T, V] for token ids [1, T]"
        )
    operand = logits.operand
    if operand.type.shape[0] != TOKENS:  # type: ignore[union-attr]
        raise ImportModelError("the model doesn't return one row of logits a token")
    return operand


class _Interpreter:
    def __init__(self, traced: TracedModel, build: Builder, source: TensorSource) -> None:
        self.traced = traced
        self.build = build
        self.source = source
        self.views: dict[fx.Node, View | list[View]] = {}

    def run(self) -> View:
        """Walks the graph; returns the logits' view."""
        for node in self.traced.graph.nodes:
            self.build.node = node
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                return self._output(node)
            else:
                raise ImportModelError(f"{describe(node)}: a traced {node.op} isn't supported")
        raise ImportModelError("the traced graph has no output")

    def _placeholder(self, node: fx.Node) -> None:
        if node.name == self.traced.ids:
            self.views[node] = self.build.ids
        elif node.name in self.traced.parameters:
            self._parameter(node, self.traced.parameters[node.name])
        elif node.name in self.traced.persistent:
            name, value = self.traced.buffers[node.name]
            if value is None:  # no real value here: the checkpoint has it
                self._parameter(node, name)

    def _parameter(self, node: fx.Node, name: str) -> None:
        stored = self.source.info(name)[0]
        if stored not in tuple(DType):
            raise ImportModelError(
                f"parameter {name!r} is {stored}; convert the model to float32 or bfloat16 first"
            )
        self.views[node] = self.build.parameter(name, node.meta["val"], DType(stored))

    def _output(self, node: fx.Node) -> View:
        results = node.args[0]
        result = results[0] if isinstance(results, tuple | list) else results
        return view_of(self.build, self._argument(result))

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source = self.views.get(node.args[0])  # type: ignore[arg-type]
            if isinstance(source, list):
                self.views[node] = source[node.args[1]]  # type: ignore[index]
            return
        if isinstance(node.meta.get("val"), torch.SymInt | int | bool | float):
            return  # a size: evaluated where it is needed
        name = _op_name(node)
        if name in IGNORED or not self._depends_on_tokens(node):
            return
        if _is_empty(node):
            self.views[node] = EMPTY  # e.g. the dims beyond a rotary size that is the head size
            return
        handler = HANDLERS.get(name.removesuffix("_")) or HANDLERS.get(name)
        if handler is None:
            raise self.build.fail(
                "this op isn't supported on values that depend on tokens; write it with ops of "
                "torch.nn.functional that are (linear, embedding, norms, activations, "
                "arithmetic, scaled_dot_product_attention), or register it with the importer"
            )
        args = [self._argument(arg) for arg in node.args]
        kwargs = {key: self._argument(arg) for key, arg in node.kwargs.items()}
        for noise in ("layout", "device", "pin_memory", "memory_format", "non_blocking", "dtype"):
            kwargs.pop(noise, None)
        try:
            self.views[node] = handler(
                self.build, node, *args, name=name.removesuffix("_"), **kwargs
            )
        except (VerifyError, TypeError, KeyError, IndexError) as error:
            raise self.build.fail(
                f"this use of the op isn't supported ({type(error).__name__}: {error})"
            ) from error

    def _depends_on_tokens(self, node: fx.Node) -> bool:
        return any(source in self.views for source in node.all_input_nodes)

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            view = self.views.get(arg)
            if view is not None:
                return view
            value = arg.meta.get("val")
            if isinstance(value, int | float | bool) or value is None:
                return value
            return self.build.dim(value) if isinstance(value, torch.SymInt) else arg
        if isinstance(arg, list | tuple):
            return [self._argument(item) for item in arg]
        return arg


def _is_empty(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(
        isinstance(size, int) and size == 0 for size in value.shape
    )


def _op_name(node: fx.Node) -> str:
    """`add` of aten.add.Tensor; other callables by their own name."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is not None and str(packet).startswith("aten."):
        return str(packet).removeprefix("aten.")
    return str(node.target)

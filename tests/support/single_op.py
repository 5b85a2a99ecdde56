"""Runs one op through build, verifier and interpreter, without writing a module by hand."""

from collections.abc import Mapping, Sequence

import torch

from ropeway.compiler import ir
from ropeway.compiler.ops import registry
from ropeway.compiler.ops.interpreter import Interpreter
from ropeway.compiler.ops.verifier import verify
from ropeway.compiler.ops.weight_functions import TORCH_DTYPES

DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
Caches = Mapping[str, torch.Tensor]


def run_op(
    name: str,
    args: Sequence[torch.Tensor | Caches],
    kwargs: Mapping[str, torch.Tensor] | None = None,
    *,
    poison: bool = True,
    **attrs: object,
) -> list[torch.Tensor]:
    """The op's results on these tensors; a mapping among `args` is a cache by planes."""
    module, function = ir.Module("m"), ir.Function("f")
    module.functions["f"] = function
    inputs: dict[str, torch.Tensor] = {}
    caches: dict[str, Caches] = {}

    def feed(operand: torch.Tensor | Caches) -> ir.Value:
        key = f"in{len(function.inputs)}"
        if isinstance(operand, torch.Tensor):
            kind: ir.Type = ir.TensorType(DTYPES[operand.dtype], tuple(operand.shape))
            inputs[key] = operand
        else:
            planes = [ir.Plane(n, DTYPES[t.dtype], tuple(t.shape[2:])) for n, t in operand.items()]
            kind = ir.CacheType(0, tuple(planes))
            caches[key] = operand
        value = ir.Value(key, kind)
        function.inputs.append(ir.Input(value))
        return value

    values = [feed(operand) for operand in args]
    named = {key: feed(operand) for key, operand in (kwargs or {}).items()}
    op = registry.build(function, name, values, named, attrs)
    function.outputs = [(result, "") for result in op.results]
    verify(module)
    outputs = Interpreter(module, {}, poison=poison).run(function, inputs, caches)
    return [outputs[result.name] for result in op.results]

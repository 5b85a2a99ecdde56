"""Meanings of the tensor ops: data moved unchanged, save for casts."""

from collections.abc import Sequence

import torch

from ropeway.compiler.ops.reference.call import Call, Reference

Results = Sequence[torch.Tensor]


def _slice(call: Call) -> Results:
    x, start, stop = call.raw("x"), call.integer("start"), call.integer("stop")
    return [x.narrow(call.integer("axis"), start, stop - start)]


def _concat(call: Call) -> Results:
    operands = [call.raw(index) for index in range(len(call.args))]
    return [torch.cat(operands, dim=call.integer("axis"))]


TABLE: dict[str, Reference] = {
    "tensor.reshape": lambda call: [call.raw("x").reshape(call.sizes("shape"))],
    "tensor.transpose": lambda call: [call.raw("x").permute(call.sizes("perm"))],
    "tensor.slice": _slice,
    "tensor.concat": _concat,
    "tensor.cast": lambda call: [call.raw("x")],
    "tensor.expand": lambda call: [call.raw("x").expand(call.sizes("shape"))],
    "tensor.gather_rows": lambda call: [call.raw("x")[call.raw("rows").long()]],
}

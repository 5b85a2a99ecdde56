"""Meanings of the math ops: float32 for floats, exact for integers."""

from collections.abc import Callable, Sequence
from typing import cast

import torch

from ropeway.compiler.ops.reference.call import Call, Reference

Results = Sequence[torch.Tensor]


def _operands(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    x = _exact(call, 0)
    if "scalar" in call.attrs:
        return x, torch.tensor(cast(float, call.attrs["scalar"]), dtype=x.dtype)
    return x, _exact(call, 1)


def _exact(call: Call, key: int) -> torch.Tensor:
    raw = call.raw(key)
    return raw.float() if raw.is_floating_point() else raw


def _binary(compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Reference:
    def reference(call: Call) -> Results:
        return [compute(*_operands(call))]

    return reference


def _unary(compute: Callable[[torch.Tensor], torch.Tensor]) -> Reference:
    def reference(call: Call) -> Results:
        return [compute(_exact(call, 0))]

    return reference


def _mean(call: Call) -> Results:
    return [call.f32("x").mean(dim=call.sizes("axes"), keepdim=call.flag("keepdim"))]


def _sum(call: Call) -> Results:
    return [call.f32("x").sum(dim=call.sizes("axes"), keepdim=call.flag("keepdim"))]


TABLE: dict[str, Reference] = {
    "math.add": _binary(torch.add),
    "math.sub": _binary(torch.sub),
    "math.mul": _binary(torch.mul),
    "math.div": _binary(torch.div),
    "math.pow": _binary(torch.pow),
    "math.max": _binary(torch.maximum),
    "math.min": _binary(torch.minimum),
    "math.neg": _unary(torch.neg),
    "math.exp": _unary(torch.exp),
    "math.rsqrt": _unary(torch.rsqrt),
    "math.sqrt": _unary(torch.sqrt),
    "math.cos": _unary(torch.cos),
    "math.sin": _unary(torch.sin),
    "math.abs": _unary(torch.abs),
    "math.mean": _mean,
    "math.sum": _sum,
}

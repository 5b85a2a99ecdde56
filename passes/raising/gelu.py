"""raise-gelu: the tanh approximation of GELU, spelt out, becomes nn.gelu."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ropeway.compiler.ir.graph import Op, Operand, Value
from ropeway.compiler.pipeline.base import Numerics, Phase
from ropeway.compiler.pipeline.emit import emit
from ropeway.compiler.pipeline.match import Attempt
from ropeway.compiler.pipeline.rewrite_pass import RewritePass
from ropeway.passes.raising.chains import beside, erase_dead

_POINTS = np.linspace(-4.0, 4.0, 33)
_ARGUMENT = math.sqrt(2 / math.pi) * (_POINTS + 0.044715 * _POINTS**3)
_BINARY = {
    "math.add": np.add,
    "math.sub": np.subtract,
    "math.mul": np.multiply,
    "math.pow": np.power,
}


@dataclass(frozen=True)
class RaiseGelu(RewritePass):
    """0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) -> nn.gelu(x, tanh). REORDER.

    The polynomial may be spelt in any way: it is compared by its values at some points.
    """

    name: ClassVar[str] = "raise-gelu"
    phase: ClassVar[Phase] = "raise"
    numerics: ClassVar[Numerics] = Numerics.REORDER
    anchors: ClassVar[tuple[str, ...]] = ("nn.tanh",)

    def rewrite(self, attempt: Attempt, op: Op) -> None:
        m = attempt
        shifted = m.sole_user(op.result, "the tanh")
        plus_one = shifted.name == "math.add" and shifted.attrs.get("scalar") == 1.0
        m.require(plus_one, "1 is added to the tanh", shifted)
        product = m.sole_user(shifted.result, "1 + tanh")
        binary = product.name == "math.mul" and len(product.args) == 2
        m.require(binary, "1 + tanh is multiplied with a value", product)
        other = product.args[1] if product.args[0] is shifted.result else product.args[0]
        x, halved = _half(m.value(other, "the other factor"))
        if not halved:
            x = m.value(other, "the other factor")
            product = m.sole_user(product.result, "x * (1 + tanh)")
            half = product.name == "math.mul" and product.attrs.get("scalar") == 0.5
            m.require(half, "the product is halved", product)
        argument = _evaluate(op.args[0], x)
        near = argument is not None and np.allclose(argument, _ARGUMENT, rtol=1e-5, atol=1e-6)
        m.require(near, "tanh is taken of sqrt(2/pi) * (x + 0.044715 x^3)")
        m.require(product.result.type == x.type, "the result is of x's dtype", product)
        gelu = emit(
            m.rewriter,
            product,
            "nn.gelu",
            [x],
            attrs={"approximate": "tanh"},
            names=[beside(product.result, "gelu")],
        )
        m.rewriter.replace(product.result, gelu.result)
        erase_dead(m.rewriter, product)


def _half(value: Value) -> tuple[Value, bool]:
    op = value.producer
    if op is not None and op.name == "math.mul" and op.attrs.get("scalar") == 0.5:
        inner = op.args[0]
        return (inner, True) if isinstance(inner, Value) else (value, False)
    return value, False


def _evaluate(operand: Operand, x: Value, depth: int = 0) -> npt.NDArray[np.float64] | None:
    """The operand at the sample points as a function of x, None if it isn't one."""
    if operand is x:
        return _POINTS
    op = operand.producer if isinstance(operand, Value) else None
    if op is not None and op.name == "tensor.cast":
        return _evaluate(op.args[0], x, depth + 1)
    if op is None or depth > 8 or op.name not in _BINARY:
        return None
    first = _evaluate(op.args[0], x, depth + 1)
    second: npt.NDArray[np.float64] | None
    if len(op.args) == 2:
        second = _evaluate(op.args[1], x, depth + 1)
    else:
        second = np.asarray(op.attrs["scalar"], np.float64)
    if first is None or second is None:
        return None
    if op.name == "math.pow" and not float(second.ravel()[0]).is_integer():
        return None  # a root of a negative point
    return np.asarray(_BINARY[op.name](first, second), np.float64)

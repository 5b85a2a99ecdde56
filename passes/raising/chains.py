"""Steps that raising patterns share: walking through reshapes, erasing what a match left over."""

from __future__ import annotations

from ropeway.compiler.ir.graph import Op, Operand, Value
from ropeway.compiler.ir.rewrite import Rewriter
from ropeway.compiler.ir.types import TensorType
from ropeway.compiler.ops.registry import get


def last_axis(reduction: Op) -> bool:
    """Whether a reduction is over the last axis alone."""
    kind = reduction.args[0].type
    assert isinstance(kind, TensorType)
    return reduction.attrs["axes"] in ((kind.rank - 1,), (-1,))


def through_reshape(rewriter: Rewriter, value: Value) -> list[Op]:
    """The users of a value, those behind a reshape of it included."""
    found: list[Op] = []
    for user in rewriter.users(value):
        if user.name == "tensor.reshape":
            found.extend(rewriter.users(user.result))
        else:
            found.append(user)
    return found


def behind_reshape(operand: Operand) -> Operand:
    """The operand, or what it is a reshape of."""
    op = operand.producer if isinstance(operand, Value) else None
    return op.args[0] if op is not None and op.name == "tensor.reshape" else operand


def beside(value: Value, word: str) -> str:
    """A name for what replaces `value`: its stem (the layer and submodule) and a word."""
    stem = value.name.rpartition(".")[0]
    return f"{stem}.{word}" if stem else word


def erase_dead(rewriter: Rewriter, op: Op) -> None:
    """Erases an op nobody needs, and then those that only it needed."""
    stack = [op]
    while stack:
        current = stack.pop()
        if not all(rewriter.is_dead(result) for result in current.results):
            continue
        if get(current.name).writes or not any(current is live for live in rewriter.function.ops):
            continue
        rewriter.erase(current)
        for _, operand in current.operands():
            if isinstance(operand, Value) and operand.producer is not None:
                stack.append(operand.producer)

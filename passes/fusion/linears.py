"""Merging linears that read the same input into one GEMM, whose result is then sliced."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile

from ropeway.compiler.ir.graph import Op
from ropeway.compiler.ir.types import TensorType
from ropeway.compiler.ir.weights import Apply, Weight
from ropeway.compiler.pipeline.emit import emit
from ropeway.compiler.pipeline.match import Attempt


def require_mergeable(m: Attempt, linears: Sequence[Op], what: str) -> None:
    """Constraints under which one GEMM can stand for all of `linears`."""
    first = linears[0]
    m.require(len({id(op) for op in linears}) == len(linears), f"{what} are one nn.linear already")
    for op in linears[1:]:
        m.require(op.args[0] is first.args[0], f"{what} read different inputs", op)
    weights = [m.weight(op.args[1], "the matrix") for op in linears]
    m.require(
        len({weight.type.dtype for weight in weights}) == 1, f"{what} have weights of one dtype"
    )
    biased = ["bias" in op.kwargs for op in linears]
    m.require(
        all(biased) or not any(biased),
        f"{what} must all have a bias or none; here: "
        + ", ".join("bias" if has else "no bias" for has in biased),
        next((op for op, has in zip(linears, biased, strict=True) if not has), None),
    )
    for op in linears:
        if "bias" in op.kwargs:
            m.weight(op.kwargs["bias"], "the bias")
        m.require(op.attrs == first.attrs, f"{what} have the same result dtype", op)


def merge_linears(m: Attempt, linears: Sequence[Op], tag: str) -> Op:
    """Replace `linears` by one, with a slice of its result for each; weights concat along N.

    The weights become expressions over the old ones, evaluated when the artifact is written.
    """
    rewriter = m.rewriter
    first = min(linears, key=rewriter.function.ops.index)
    matrices = [m.weight(op.args[1], "the matrix") for op in linears]
    kwargs = {}
    if "bias" in first.kwargs:
        biases = [m.weight(op.kwargs["bias"], "the bias") for op in linears]
        kwargs["bias"] = _concat_weights(m, biases, tag)
    merged = emit(
        rewriter,
        first,
        "nn.linear",
        [first.args[0], _concat_weights(m, matrices, tag)],
        kwargs=kwargs,
        attrs=first.attrs,
        names=[tag],
    )
    stops = list(accumulate(int(weight.type.shape[0]) for weight in matrices))
    for op, start, stop in zip(linears, [0, *stops], stops, strict=False):
        attrs = {"axis": 1, "start": start, "stop": stop}
        names = [op.result.name]
        part = emit(rewriter, first, "tensor.slice", [merged.result], attrs=attrs, names=names)
        rewriter.replace(op.results[0], part.results[0])
    for op in linears:
        rewriter.erase(op)
    return merged


def _concat_weights(m: Attempt, weights: Sequence[Weight], tag: str) -> Weight:
    module = m.rewriter.module
    expr = Apply("concat", tuple(weight.expr for weight in weights), (("axis", 0),))
    for weight in module.weights.values():
        if weight.expr == expr:
            return weight  # layers that share weights share the merged one too
    rows = sum(int(weight.type.shape[0]) for weight in weights)
    first = weights[0].type
    merged = Weight(
        m.rewriter.fresh_weight(_merged_name([weight.name for weight in weights], tag)),
        TensorType(first.dtype, (rows, *first.shape[1:])),
        expr,
    )
    return module.add_weight(merged)


def _merged_name(names: Sequence[str], tag: str) -> str:
    """a.q_proj.weight, a.k_proj.weight -> a.<tag>.weight: what the names share, around the tag."""
    parts = [name.split(".") for name in names]
    head = _shared_prefix(parts)
    rest = [part[len(head) :] for part in parts]
    tail = _shared_prefix([part[::-1] for part in rest])[::-1]
    return ".".join([*head, tag, *tail])


def _shared_prefix(parts: Sequence[Sequence[str]]) -> list[str]:
    shared = takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    return [column[0] for column in shared]

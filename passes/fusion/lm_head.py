"""lower-lm-head: compute logits only for the rows that are sampled, in float32.

A gather of the wanted rows (input role `rows`, L of them) is put before the logits and pulled up
through row-wise ops as far as it goes: an op moves behind the gather when all its results are
wanted at those rows only. In a transformer that is the head, the last norm, the last layer's MLP
and its output projection: the gather lands on the attention's result and on the residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.attrs import Attr
from ropeway.compiler.ir.dims import free_symbols, is_dim, same, substitute, symbol
from ropeway.compiler.ir.graph import Input, Module, Op, Operand, Value
from ropeway.compiler.ir.rewrite import Rewriter
from ropeway.compiler.ir.types import DType, TensorType, Type
from ropeway.compiler.ir.weights import Weight
from ropeway.compiler.ops.registry import get, is_rowwise
from ropeway.compiler.pipeline.base import (
    NearMiss,
    Numerics,
    Pass,
    PassContext,
    PassResult,
    Phase,
)
from ropeway.compiler.pipeline.emit import emit
from ropeway.compiler.pipeline.match import describe_op

LINEARS = frozenset({"nn.linear", "nn.rms_norm_linear", "nn.add_rms_norm_linear"})
TOKENS = "T"
ROWS = "L"


@dataclass(frozen=True)
class LowerLmHead(Pass):
    """logits[T, V] -> f32 logits[L, V] of the rows named by the new input `rows`.

    REORDER: the GEMMs see other row counts. bf16 logits lose their last rounding, to f32.
    """

    name: ClassVar[str] = "lower-lm-head"
    phase: ClassVar[Phase] = "fuse"
    requires: ClassVar[frozenset[str]] = frozenset({"paged"})
    establishes: ClassVar[frozenset[str]] = frozenset({"rows"})
    numerics: ClassVar[Numerics] = Numerics.REORDER

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        module = module.clone()
        sites: list[str] = []
        misses: list[NearMiss] = []
        for function in module.functions.values():
            rewriter = Rewriter(function, module)
            miss = _miss(rewriter)
            if miss is not None:
                misses.append(miss)
                continue
            logits = function.output("logits")
            if logits is not None and logits.producer is not None:
                sites.append(logits.producer.loc or describe_op(logits.producer))
                _lower(rewriter, logits)
        return PassResult(module, len(sites), tuple(sites), tuple(misses))


def _miss(rewriter: Rewriter) -> NearMiss | None:
    function = rewriter.function
    logits = function.output("logits")
    if logits is None:
        return NearMiss(f"func @{function.name}", "has an output of role logits", function.loc)
    maker = logits.producer
    where = describe_op(maker) if maker else f"input %{logits.name}"
    loc = maker.loc if maker else ""
    if function.input("rows") is not None:
        return NearMiss(where, "the function takes rows already", loc, 1)
    if maker is None or not _has_token_rows(logits.type):
        return NearMiss(where, "logits must have one row for each of the T tokens", loc, 1)
    return None


def _lower(rewriter: Rewriter, logits: Value) -> None:
    function, module = rewriter.function, rewriter.module
    module.dims.setdefault(ROWS, module.dims.get("R", module.dims.get(TOKENS, (1, 2**20))))
    rows = Value(rewriter.fresh("rows"), TensorType(DType.I32, (symbol(ROWS),)))
    function.inputs.append(Input(rows, "rows"))
    moved = _movable(rewriter, logits)
    head = _head(logits, moved)
    move = _Move(rewriter, rows)
    for op in moved:
        move.op(op, {"out": DType.F32.value} if op is head else {})
    final = move.at_rows(logits, before=None)
    assert isinstance(final, Value)  # logits are a value, and so is what stands for them
    if final.type.dtype != DType.F32:  # type: ignore[union-attr]  # a tensor: checked by _miss
        attrs: dict[str, Attr] = {"dtype": DType.F32.value}
        final = emit(rewriter, None, "tensor.cast", [final], attrs=attrs, names=["logits"]).result
    outputs = function.outputs
    outputs[:] = [(final if value is logits else value, role) for value, role in outputs]
    for op in reversed(moved):
        rewriter.erase(op)


def _movable(rewriter: Rewriter, logits: Value) -> list[Op]:
    """The ops, in order, all of whose results are wanted at the sampled rows only."""
    moved: dict[Op, None] = {}
    for op in reversed(rewriter.function.ops):
        wanted = any(
            result is logits or any(user in moved for user in rewriter.users(result))
            for result in op.results
        )
        if (
            wanted
            and _is_row_wise(op)
            and all(_only_rows(rewriter, r, logits, moved) for r in op.results)
        ):
            moved[op] = None
    return list(reversed(moved))


def _only_rows(rewriter: Rewriter, value: Value, logits: Value, moved: dict[Op, None]) -> bool:
    roles = [role for output, role in rewriter.function.outputs if output is value]
    only_logits = not roles or (value is logits and len(roles) == 1)
    return only_logits and all(user in moved for user in rewriter.users(value))


def _is_row_wise(op: Op) -> bool:
    """Whether row i of every result depends only on row i of each operand with T rows."""
    if get(op.name).writes or not is_rowwise(op):
        return False
    if not all(_has_token_rows(result.type) for result in op.results):
        return False
    values = [operand for _, operand in op.operands() if isinstance(operand, Value)]
    return all(_has_token_rows(value.type) or not _has_tokens(value.type) for value in values)


def _head(logits: Value, moved: list[Op]) -> Op | None:
    """The GEMM that makes the logits, seen through casts and soft capping, if there is one."""
    op = logits.producer
    while op is not None and op in moved and op.name not in LINEARS:
        values = [operand for _, operand in op.operands() if isinstance(operand, Value)]
        if len(values) != 1 or len(list(op.operands())) != 1:
            return None
        op = values[0].producer
    return op if op in moved else None


class _Move:
    """Rebuilds ops on gathered rows; remembers which value stands for which."""

    def __init__(self, rewriter: Rewriter, rows: Value) -> None:
        self.rewriter = rewriter
        self.rows = rows
        self.gathered: dict[Operand, Operand] = {}

    def op(self, op: Op, more: dict[str, Attr]) -> None:
        built = emit(
            self.rewriter,
            op,
            op.name,
            [self.at_rows(operand, op) for operand in op.args],
            kwargs={key: self.at_rows(operand, op) for key, operand in op.kwargs.items()},
            attrs={key: _at_rows(value) for key, value in op.attrs.items()} | more,
            loc=op.loc,
            names=[result.name for result in op.results],
        )
        self.gathered.update(zip(op.results, built.results, strict=True))

    def at_rows(self, operand: Operand, before: Op | None) -> Operand:
        """`operand` at the wanted rows; itself if it has no token rows. Gathered once."""
        if isinstance(operand, Weight) or not _has_tokens(operand.type):
            return operand
        if operand not in self.gathered:
            gather = emit(
                self.rewriter,
                before,
                "tensor.gather_rows",
                [operand, self.rows],
                loc=operand.producer.loc if operand.producer else "",
                names=[f"{operand.name}_rows"],
            )
            self.gathered[operand] = gather.result
        return self.gathered[operand]


def _at_rows(attr: Attr) -> Attr:
    """The target shape of a reshape or expand with L in the place of T."""
    if isinstance(attr, tuple):
        return tuple(substitute(d, {TOKENS: symbol(ROWS)}) if is_dim(d) else d for d in attr)
    return attr


def _has_tokens(kind: Type) -> bool:
    return isinstance(kind, TensorType) and any(TOKENS in free_symbols(dim) for dim in kind.shape)


def _has_token_rows(kind: Type) -> bool:
    """T is the first axis, and no other axis depends on it."""
    return (
        isinstance(kind, TensorType)
        and kind.rank > 0
        and same(kind.shape[0], symbol(TOKENS))
        and not any(TOKENS in free_symbols(dim) for dim in kind.shape[1:])
    )

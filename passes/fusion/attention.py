"""fuse-attention: attention over one sequence becomes attention over a paged KV cache.

nn.sdpa, which means one sequence of T tokens, is replaced by nn.paged_attention, which writes this
step's K and V into the cache and reads back what each request holds so far; the function becomes a
step over many requests. Layers whose caches have the same planes and the same sliding window form
a group, which shares slots and a block table: full and sliding layers get different groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from ropeway.compiler.errors import PipelineError
from ropeway.compiler.ir.dims import same, symbol
from ropeway.compiler.ir.graph import Input, Module, Op, Value
from ropeway.compiler.ir.rewrite import Rewriter
from ropeway.compiler.ir.types import CacheType, DType, Plane, TensorType, Type
from ropeway.compiler.ops.registry import attr
from ropeway.compiler.pipeline.base import (
    NearMiss,
    Numerics,
    Pass,
    PassContext,
    PassResult,
    Phase,
)
from ropeway.compiler.pipeline.emit import emit
from ropeway.compiler.pipeline.match import Attempt, Miss, describe_op

MAX_REQUESTS = 256
"""Upper end of the range of R where the module states none; buckets narrow it."""


@dataclass(frozen=True)
class FuseAttention(Pass):
    """nn.sdpa -> nn.paged_attention; adds inputs slots.<g>, block_table.<g>, query_start, lengths
    and one cache for each layer, in the order of the layers.

    All attentions of a function are replaced or none: a half-paged function has no meaning.
    REORDER: the softmax runs over blocks of keys.
    """

    block_size: int = 32

    name: ClassVar[str] = "fuse-attention"
    phase: ClassVar[Phase] = "fuse"
    requires: ClassVar[frozenset[str]] = frozenset({"one-sequence", "gqa-raised"})
    establishes: ClassVar[frozenset[str]] = frozenset({"paged"})
    destroys: ClassVar[frozenset[str]] = frozenset({"one-sequence"})
    numerics: ClassVar[Numerics] = Numerics.REORDER

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        if self.block_size < 1:
            raise PipelineError(
                f"fuse-attention: block-size {self.block_size} must be at least 1; 32 is usual"
            )
        module = module.clone()
        sites: list[str] = []
        misses: list[NearMiss] = []
        for function in module.functions.values():
            rewriter = Rewriter(function, module)
            attentions = [op for op in function.ops if op.name == "nn.sdpa"]
            missed = _misses(rewriter, attentions)
            misses += missed
            if missed or not attentions:
                continue
            sites += [op.loc or describe_op(op) for op in attentions]
            _page(rewriter, attentions, self.block_size)
        return PassResult(module, len(sites), tuple(sites), tuple(misses))


def _misses(rewriter: Rewriter, attentions: Sequence[Op]) -> list[NearMiss]:
    misses: list[NearMiss] = []
    for op in attentions:
        try:
            _require_cacheable(Attempt(op, rewriter), op)
        except Miss as miss:
            misses.append(miss.near)
    return misses


def _require_cacheable(m: Attempt, op: Op) -> None:
    m.require(
        attr(op, "causal") is True,
        "causal attention: a token that sees later ones can't be served from a cache",
    )
    for what, operand in zip(("q", "k", "v"), op.args, strict=True):
        kind = m.value(operand, what).type
        shape = kind.shape if isinstance(kind, TensorType) else ()
        m.require(same(shape[0], symbol("T")), f"{what} has one row for each of the T tokens")
        fixed = all(isinstance(dim, int) for dim in shape[1:])
        m.require(fixed, f"{what} has a fixed number of heads and a fixed head size")
    paged = m.rewriter.function.input("lengths") is not None
    m.require(not paged, "the function has no paged attention yet")


def _page(rewriter: Rewriter, attentions: Sequence[Op], block_size: int) -> None:
    _declare_dims(rewriter.module)
    groups = _groups(attentions)
    tables = {
        group: (
            _add_input(rewriter, f"slots_{group}", _i32("T"), f"slots.{group}"),
            _add_input(rewriter, f"block_table_{group}", _i32("R", "MB"), f"block_table.{group}"),
        )
        for group in dict.fromkeys(groups)
    }
    starts_type = TensorType(DType.I32, (symbol("R") + 1,))
    starts = _add_input(rewriter, "query_start", starts_type, "query_start")
    lengths = _add_input(rewriter, "lengths", _i32("R"), "lengths")
    for layer, (op, group) in enumerate(zip(attentions, groups, strict=True)):
        cache = _add_input(rewriter, f"kv{layer}", CacheType(group, _planes(op)), "cache")
        slots, table = tables[group]
        attrs = {key: value for key, value in op.attrs.items() if key != "causal"}
        paged = emit(
            rewriter,
            op,
            "nn.paged_attention",
            [*op.args, cache, slots, table, starts, lengths],
            attrs={**attrs, "block_size": block_size},
            names=["attention"],
        )
        rewriter.replace(op.result, paged.result)
        rewriter.erase(op)


def _groups(attentions: Sequence[Op]) -> list[int]:
    """The cache group of each attention: one for each (planes, window), in order of appearance."""
    numbers: dict[tuple[tuple[Plane, ...], int], int] = {}
    return [
        numbers.setdefault((_planes(op), cast(int, attr(op, "window"))), len(numbers))
        for op in attentions
    ]


def _planes(op: Op) -> tuple[Plane, ...]:
    kinds = [cast(TensorType, cast(Value, operand).type) for operand in op.args[1:3]]
    return tuple(
        Plane(name, kind.dtype, tuple(cast(int, dim) for dim in kind.shape[1:]))
        for name, kind in zip(("k", "v"), kinds, strict=True)
    )


def _declare_dims(module: Module) -> None:
    """Ranges for R and MB where the module states none, from those of T and of the context."""
    tokens = module.dims["T"][1] if "T" in module.dims else 2**20
    context = module.metadata.get("max_model_len", tokens)
    module.dims.setdefault("R", (1, min(MAX_REQUESTS, tokens)))
    module.dims.setdefault("MB", (1, context if isinstance(context, int) else tokens))


def _i32(*dims: str) -> TensorType:
    return TensorType(DType.I32, tuple(symbol(name) for name in dims))


def _add_input(rewriter: Rewriter, name: str, kind: Type, role: str) -> Value:
    value = Value(rewriter.fresh(name), kind)
    rewriter.function.inputs.append(Input(value, role))
    return value

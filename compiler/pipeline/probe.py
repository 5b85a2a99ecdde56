"""Run any state of a module on one random sequence, so that states can be compared.

Whatever stage a module is at, the same question is asked of it: the outputs for every token of one
sequence. A module before fuse-attention gets ids and positions; a paged one also gets caches full
of NaN and a scrambled block table; one that takes rows is asked for all of them. The weights are
random: each weight expression of the starting module counts as one unknown tensor, so passes may
rewrite expressions, but only into others over these unknowns.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from ropeway.compiler.errors import RunError
from ropeway.compiler.ir.dims import same, symbol
from ropeway.compiler.ir.graph import Function, Module, Value
from ropeway.compiler.ir.printer import print_expr
from ropeway.compiler.ir.types import CacheType, TensorType
from ropeway.compiler.ir.weights import Apply, Ckpt, Weight, WeightExpr
from ropeway.compiler.ops.interpreter import Interpreter
from ropeway.compiler.ops.registry import attr
from ropeway.compiler.ops.weight_functions import TORCH_DTYPES, MappedTensors, evaluate_logical

F32_TOLERANCE = 1e-4
HALF_TOLERANCE = 5e-2
"""Relative to the largest value; half precision rounds to 2^-8 at every op."""


class Probe:
    """Random weights and inputs, fixed by `seed`, for all states that descend from `module`.

    The sequence has `tokens` tokens. Raises RunError when a state reads a tensor that `module`
    doesn't, or when `module` gives one tensor two types.
    """

    def __init__(self, module: Module, *, tokens: int = 7, seed: int = 0) -> None:
        self.module = module
        self.tokens = tokens
        self.seed = seed
        self._unknowns = self._draw_weights()
        self._source = MappedTensors(
            {print_expr(expr): tensor for expr, tensor in self._unknowns.items()}
        )

    def _draw_weights(self) -> dict[WeightExpr, torch.Tensor]:
        types: dict[WeightExpr, TensorType] = {}
        for weight in self.module.weights.values():
            if types.setdefault(weight.expr, weight.type) != weight.type:
                raise RunError(
                    f"@{weight.name} and another weight hold {print_expr(weight.expr)} as two "
                    "types: only one of them can be right"
                )
        return {expr: self._random(print_expr(expr), kind) for expr, kind in types.items()}

    @property
    def tolerance(self) -> float:
        """How far REORDER passes may move values, relative to the largest."""
        half = any(
            isinstance(value.type, TensorType) and value.type.dtype.itemsize == 2
            for value in self.module.fn.values()
        )
        return HALF_TOLERANCE if half else F32_TOLERANCE

    @cached_property
    def reference(self) -> list[torch.Tensor]:
        """The outputs of the starting module."""
        return self.outputs(self.module)

    def error(self, state: Module, *, chunks: Sequence[int] | None = None) -> float:
        """The largest difference to the reference, relative to its largest value.

        0 only for equal bits; infinite where a value is NaN on one side only.
        """
        worst = 0.0
        for expected, found in zip(self.reference, self.outputs(state, chunks), strict=True):
            worst = max(worst, _error(expected.float(), found.float()))
        return worst

    def outputs(self, state: Module, chunks: Sequence[int] | None = None) -> list[torch.Tensor]:
        """All outputs of the one function, rows of all chunks joined.

        `chunks` are the sizes of successive steps; without it one step takes all tokens. Only a
        paged module can be asked for several.
        """
        function = state.fn
        weights = {name: self._evaluate(weight) for name, weight in state.weights.items()}
        interpreter = Interpreter(state, weights, poison=True)
        pages = _Pages(function, self.tokens, self.seed)
        parts: list[list[torch.Tensor]] = []
        done = 0
        for size in chunks or (self.tokens,):
            inputs = self._inputs(function, pages, done, done + size)
            parts.append(list(interpreter.run(function, inputs, pages.caches).values()))
            done += size
        return [torch.cat(part) for part in zip(*parts, strict=True)]

    def _evaluate(self, weight: Weight) -> torch.Tensor:
        return evaluate_logical(self._over_unknowns(weight.expr), self._source, None)

    def _over_unknowns(self, expr: WeightExpr) -> WeightExpr:
        if expr in self._unknowns:
            return Ckpt(print_expr(expr))
        if isinstance(expr, Apply):
            args = tuple(self._over_unknowns(arg) for arg in expr.args)
            return Apply(expr.fn, args, expr.attrs)
        raise RunError(
            f"a weight reads {print_expr(expr)}, which the starting module doesn't hold: "
            "start from an earlier state"
        )

    def _inputs(
        self, function: Function, pages: _Pages, start: int, stop: int
    ) -> dict[str, torch.Tensor]:
        """Inputs by value name for tokens start..stop-1 of the sequence."""
        inputs: dict[str, torch.Tensor] = {}
        for entry in function.inputs:
            value = entry.value
            if not isinstance(value.type, TensorType):
                continue
            made = pages.input(entry.role, start, stop)
            if made is None and entry.role == "ids":
                made = self._ids[start:stop]
            if made is None:
                made = self._sequence_input(value, start, stop)
            inputs[value.name] = made
        return inputs

    @cached_property
    def _ids(self) -> torch.Tensor:
        """Token ids within every table that the starting module looks ids up in."""
        sizes = [
            int(op.args[0].type.shape[0])
            for op in self.module.fn.ops
            if op.name == "nn.embedding" and op.args[1] is self.module.fn.input("ids")
            if isinstance(op.args[0].type, TensorType)
        ]
        highest = min(sizes, default=1)
        return torch.randint(highest, (self.tokens,), generator=self._generator("ids")).int()

    def _sequence_input(self, value: Value, start: int, stop: int) -> torch.Tensor:
        """A made-up input: rows start..stop-1 where its first axis is T, else all of it."""
        kind = value.type
        if not isinstance(kind, TensorType):
            raise RunError(f"input %{value.name} isn't a tensor: give it a role")
        sizes = {"T": self.tokens, "R": 1, "L": self.tokens, "MB": self.tokens, "NB": 2}
        made = self._random(f"input {value.name}", kind.substitute(sizes))
        by_token = bool(kind.shape) and same(kind.shape[0], symbol("T"))
        return made[start:stop] if by_token else made

    def _random(self, key: str, kind: TensorType) -> torch.Tensor:
        dtype = TORCH_DTYPES[kind.dtype]
        shape = [int(size) for size in kind.shape]
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype)
        drawn = torch.randn(shape, generator=self._generator(key))
        if len(shape) == 1:
            drawn = 1 + 0.2 * drawn  # gains and biases
        elif len(shape) == 2 and shape[1]:
            drawn = drawn * (2 / shape[1] ** 0.5)  # keeps the size of rows through a GEMM
        return drawn.to(dtype)

    def _generator(self, key: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(ascii((self.seed, key)).encode()))


class _Pages:
    """Caches full of NaN, and one request's scrambled block tables, one for each group."""

    def __init__(self, function: Function, tokens: int, seed: int) -> None:
        sizes = [attr(op, "block_size") for op in function.ops if op.name == "nn.paged_attention"]
        self.block_size = next((size for size in sizes if isinstance(size, int)), 1)
        self.tokens = tokens
        self.seed = seed
        blocks = -(-tokens // self.block_size)
        count = 2 * blocks + 2
        self.caches: dict[str, Mapping[str, torch.Tensor]] = {}
        self.tables: dict[str, torch.Tensor] = {}
        for entry in function.inputs:
            if isinstance(entry.value.type, CacheType):
                self.caches[entry.value.name] = _empty(entry.value.type, count, self.block_size)
            if entry.role.startswith("block_table."):
                group = entry.role.partition(".")[2]
                generator = torch.Generator().manual_seed(seed + 7 * len(self.tables) + 1)
                self.tables[group] = 1 + torch.randperm(count - 1, generator=generator)[:blocks]

    def input(self, role: str, start: int, stop: int) -> torch.Tensor | None:
        """The input of a role that says where tokens start..stop-1 of the sequence lie."""
        kind, _, group = role.partition(".")
        if kind == "block_table":
            return self.tables[group][None].int()
        positions = torch.arange(start, stop)
        if kind == "slots":
            blocks = self.tables[group][positions // self.block_size]
            return (blocks * self.block_size + positions % self.block_size).int()
        values = {
            "positions": positions,
            "rows": positions - start,
            "query_start": torch.tensor([0, stop - start]),
            "lengths": torch.tensor([stop]),
        }
        return values[kind].int() if kind in values else None


def _empty(kind: CacheType, blocks: int, block_size: int) -> Mapping[str, torch.Tensor]:
    return {
        plane.name: torch.full(
            (blocks, block_size, *plane.shape), float("nan"), dtype=TORCH_DTYPES[plane.dtype]
        )
        for plane in kind.planes
    }


def _error(expected: torch.Tensor, found: torch.Tensor) -> float:
    if expected.shape != found.shape:
        return float("inf")
    if torch.equal(expected.isnan(), found.isnan()):
        expected, found = expected.nan_to_num(), found.nan_to_num()
    difference = (expected - found).abs().max().item()
    if math.isnan(difference):
        return float("inf")
    return difference / max(expected.abs().max().item(), 1e-30)

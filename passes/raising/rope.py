"""raise-rope: any arithmetic that rotates pairs of dims by position becomes nn.rope.

The pass doesn't match one spelling. It takes the region of ops that mix a value with tables looked
up by position, evaluates it symbolically (which table column times which element of x lands in
which element of the result), and compares with what nn.rope does: halves or interleaved pairs, all
dims or the first of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.graph import Function, Module, Operand, Value
from ropeway.compiler.ir.rewrite import Rewriter
from ropeway.compiler.ir.types import DType, TensorType
from ropeway.compiler.ir.weights import Weight, apply
from ropeway.compiler.pipeline.base import NearMiss, Numerics, Pass, PassContext, PassResult, Phase
from ropeway.compiler.pipeline.emit import emit
from ropeway.compiler.pipeline.match import describe_op
from ropeway.passes.raising.chains import beside, erase_dead
from ropeway.passes.raising.rotation import Rotation, Unlike, read_rotation
from ropeway.passes.raising.rotation_region import Region, find_regions


@dataclass(frozen=True)
class RaiseRope(Pass):
    """Rotation by position tables -> nn.rope(x, positions, table). REORDER.

    The rotation is then computed in f32 with one rounding, whatever the model rounded between.
    """

    name: ClassVar[str] = "raise-rope"
    phase: ClassVar[Phase] = "raise"
    establishes: ClassVar[frozenset[str]] = frozenset({"rope-raised"})
    numerics: ClassVar[Numerics] = Numerics.REORDER

    def run(self, module: Module, ctx: PassContext) -> PassResult:
        module = module.clone()
        sites: list[str] = []
        misses: list[NearMiss] = []
        for function in module.functions.values():
            self._run_function(module, function, sites, misses)
        return PassResult(module, len(sites), tuple(sites), tuple(misses))

    def _run_function(
        self, module: Module, function: Function, sites: list[str], misses: list[NearMiss]
    ) -> None:
        positions = function.input("positions")
        if positions is None:
            return
        rewriter = Rewriter(function, module)
        for region in find_regions(function, rewriter, positions):
            try:
                root, x, rotation = _match(region)
            except Unlike as fault:
                op = region.root.producer
                assert op is not None  # a region's root is always computed
                misses.append(NearMiss(describe_op(op), str(fault), op.loc))
                continue
            table = _table(module, rotation)
            rope: list[Operand] = [x, positions, table]
            sites.append(_replace(rewriter, root, rope, rotation))


def _match(region: Region) -> tuple[Value, Value, Rotation]:
    """The rotated value, what is rotated, and how. Raises Unlike."""
    root = region.root
    while True:
        try:
            x = region.source(root)
            return root, x, read_rotation(region, root, x)
        except Unlike:
            op = root.producer
            inner = op.args[0] if op is not None and op.name in _OUTER else None
            if not isinstance(inner, Value) or inner not in region.values:
                raise
            root = inner


_OUTER = ("tensor.reshape", "tensor.cast")


def _replace(rewriter: Rewriter, root: Value, operands: list[Operand], rotation: Rotation) -> str:
    anchor = root.producer
    assert anchor is not None  # a region's root is always computed
    x, kind = operands[0], root.type
    assert isinstance(kind, TensorType)
    single = kind.rank == 2
    if single:
        shape = (kind.shape[0], 1, kind.shape[1])
        x = emit(rewriter, anchor, "tensor.reshape", [x], attrs={"shape": shape}).result
    rope = emit(
        rewriter,
        anchor,
        "nn.rope",
        [x, *operands[1:]],
        attrs={"rotary_dim": rotation.size, "interleaved": rotation.interleaved},
        names=[beside(root, "rope")],
    )
    result = rope.result
    if single:
        back = emit(rewriter, anchor, "tensor.reshape", [result], attrs={"shape": kind.shape})
        result = back.result
    rewriter.replace(root, result)
    erase_dead(rewriter, anchor)
    return anchor.loc or describe_op(rope)


def _table(module: Module, rotation: Rotation) -> Weight:
    """The weight [P, R] of cosines, then sines; one for all layers that share the angles."""
    halves = []
    for table, first in ((rotation.cos, rotation.cos_at), (rotation.sin, rotation.sin_at)):
        count = rotation.size // 2
        expr = table.expr
        if table.type.shape[1] != count:
            expr = apply("slice", expr, axis=1, start=first, stop=first + count)
        halves.append(expr)
    expr = apply("concat", *halves, axis=1)
    stem = rotation.cos.name.rpartition(".")[0]
    base = f"{stem}.rope_table" if stem else "rope_table"
    name, count = base, 0
    while name in module.weights:
        if module.weights[name].expr == expr:
            return module.weights[name]
        count += 1
        name = f"{base}{count}"
    rows = rotation.cos.type.shape[0]
    return module.add_weight(Weight(name, TensorType(DType.F32, (rows, rotation.size)), expr))

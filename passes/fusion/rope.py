"""fuse-rope: the rotations of q and k of one attention become one op over both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropeway.compiler.ir.graph import Op
from ropeway.compiler.pipeline.base import Numerics, Phase
from ropeway.compiler.pipeline.emit import emit
from ropeway.compiler.pipeline.match import Attempt
from ropeway.compiler.pipeline.rewrite_pass import RewritePass


@dataclass(frozen=True)
class FuseRope(RewritePass):
    """nn.rope(q), nn.rope(k) -> nn.rope_qk(q, k). EXACT: each element is rotated as before."""

    name: ClassVar[str] = "fuse-rope"
    phase: ClassVar[Phase] = "fuse"
    requires: ClassVar[frozenset[str]] = frozenset({"one-sequence", "rope-raised"})
    establishes: ClassVar[frozenset[str]] = frozenset({"rope-fused"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    anchors: ClassVar[tuple[str, ...]] = ("nn.sdpa",)

    def rewrite(self, attempt: Attempt, op: Op) -> None:
        m = attempt
        q = m.producer(op.args[0], "q", "nn.rope")
        k = m.producer(op.args[1], "k", "nn.rope")
        m.require(q is not k, "q and k are rotated apart", q)
        m.require(q.args[1] is k.args[1], "q and k rotate by the same positions", k)
        m.require(q.args[2] is k.args[2], "q and k rotate by the same table", k)
        m.require(q.attrs == k.attrs, "q and k rotate by the same dims and pairing", k)
        order = m.rewriter.function.ops.index
        later = max(q, k, key=order)
        for rope in (q, k):
            readers = [order(user) for user in m.rewriter.users(rope.result)]
            m.require(
                min(readers) > order(later),
                "no op reads one rotated value before the other is made",
                rope,
            )
        fused = emit(
            m.rewriter,
            later,
            "nn.rope_qk",
            [q.args[0], k.args[0], q.args[1], q.args[2]],
            attrs=dict(q.attrs),
            loc=later.loc,
            names=["q", "k"],
        )
        for rope, result in zip((q, k), fused.results, strict=True):
            m.rewriter.replace(rope.result, result)
            m.rewriter.erase(rope)

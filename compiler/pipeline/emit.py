"""Building an op with inferred types and putting it in place, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ropeway.compiler.ir.attrs import Attr
from ropeway.compiler.ir.graph import Op, Operand
from ropeway.compiler.ir.rewrite import Rewriter
from ropeway.compiler.ops.registry import build


def emit(
    rewriter: Rewriter,
    before: Op | None,
    name: str,
    args: Sequence[Operand],
    *,
    kwargs: Mapping[str, Operand] | None = None,
    attrs: Mapping[str, Attr] | None = None,
    loc: str | None = None,
    names: Sequence[str] | None = None,
) -> Op:
    """A new op ahead of `before` (None: at the end), its result types inferred.

    `names` are wishes for the results' names; `loc` is that of `before` if not given. Raises
    VerifyError when the operands don't fit the op.
    """
    if loc is None:
        loc = before.loc if before is not None else ""
    op = build(rewriter, name, list(args), kwargs, attrs, loc=loc, names=names)
    if before is None:
        rewriter.append(op)
    else:
        rewriter.insert_before(before, op)
    return op

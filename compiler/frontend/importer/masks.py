"""Recognises attention masks by their values: causal, or causal within a sliding window.

A mask is evaluated at several lengths, small ones and those just past every number that stands in
its computation (a window is such a number), and compared with the families the IR knows.
"""

import torch
from torch import fx

from ropeway.compiler.errors import ImportModelError
from ropeway.compiler.frontend.importer.known import KnownGraph
from ropeway.compiler.frontend.importer.locations import describe

_PROBES = (2, 3, 5, 8, 33, 130)
# A mask of 16386 x 16386 bools is 256 MiB: the largest that is worth evaluating.
_LONGEST_PROBE = 16386
_BLOCKED = -1e4


def window_of(known: KnownGraph, node: fx.Node, max_length: int) -> int:
    """0 for a causal mask, w for a causal mask that also hides keys w or more behind.

    Raises ImportModelError, naming the mask's op and line, for any other mask.
    """
    lengths = _lengths(known, node, max_length)
    window = 0
    for length in reversed(lengths):  # the longest shows the window, the others must agree
        allowed = _allowed(known, node, length)
        if length == lengths[-1]:
            visible = int(allowed[-1].sum())
            window = 0 if visible == length else visible
        if not torch.equal(allowed, _family(length, window)):
            raise ImportModelError(
                f"{describe(node)}: the attention mask is neither causal nor a causal sliding "
                f"window (seen at {length} tokens); other masks don't compile"
            )
    return window


def _lengths(known: KnownGraph, node: fx.Node, max_length: int) -> list[int]:
    numbers = known.numbers(known.closure(node))
    near = {abs(number) + 2 for number in numbers if 2 <= abs(number) < max_length}
    if any(length > _LONGEST_PROBE for length in near):
        raise ImportModelError(
            f"{describe(node)}: a window of {max(near) - 2} tokens is too long to be checked; "
            f"give max_model_len <= {max(near) - 2}, within which the window doesn't matter"
        )
    return sorted({length for length in (*_PROBES, *near)})


def _allowed(known: KnownGraph, node: fx.Node, length: int) -> torch.Tensor:
    """bool[length, length]: True where query i (row) sees key j."""
    mask = known.evaluate(node, length)
    if mask.shape[-2:] != (length, length) or mask.numel() != length * length:
        raise ImportModelError(
            f"{describe(node)}: the attention mask has shape {tuple(mask.shape)} at {length} "
            "tokens; only one mask for all heads compiles"
        )
    mask = mask.reshape(length, length)
    if mask.dtype == torch.bool:
        return mask
    allowed = mask == 0
    if not bool((allowed | (mask <= _BLOCKED)).all()):
        raise ImportModelError(
            f"{describe(node)}: the attention mask adds biases to scores (ALiBi or relative "
            "positions); only masks that hide keys compile"
        )
    return allowed


def _family(length: int, window: int) -> torch.Tensor:
    at = torch.arange(length)
    behind = at[:, None] - at[None, :]
    visible = behind >= 0
    return visible & (behind < window) if window else visible

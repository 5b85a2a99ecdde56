"""Meanings of the attention ops, in float32."""

from collections.abc import Sequence

import torch

from ropeway.compiler.ops.reference.call import CachePlanes, Call


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    *,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """q[T,H,D] over k[S,KH,D] and v[S,KH,DV] where visible[T,S]: [T,H,DV], all float32.

    Query head h reads key head h * KH // H. A query that sees nothing gives zeros.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(group, dim=1)
    values = v.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    # A row of nothing but -inf has a softmax of NaN; it should contribute nothing.
    weights = torch.where(visible, scores.softmax(dim=-1), 0.0)
    return torch.einsum("hts,shd->thd", weights, values)


def visibility(
    queries: torch.Tensor, keys: torch.Tensor, window: int, causal: bool = True
) -> torch.Tensor:
    """bool[T, S]: which key positions each query position sees. window 0 is none."""
    distance = queries[:, None] - keys[None, :]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen & (distance < window) if window else seen


def _score(call: Call) -> dict[str, float]:
    return {"scale": call.number("scale"), "softcap": call.number("softcap")}


def sdpa(call: Call) -> Sequence[torch.Tensor]:
    """nn.sdpa: the tokens are one sequence, in order."""
    q, k, v = (call.f32(name) for name in ("q", "k", "v"))
    order = torch.arange(q.shape[0])
    visible = visibility(order, order, call.integer("window"), call.flag("causal"))
    return [attend(q, k, v, visible, **_score(call))]


def paged_attention(call: Call) -> Sequence[torch.Tensor]:
    """nn.paged_attention: writes the step's k and v, then attends request by request.

    Rows that no request owns aren't written (NaN when poisoned).
    """
    q, cache = call.f32("q"), call.cache("cache")
    block_size = call.integer("block_size")
    slots = call.raw("slots").long()
    starts = call.raw("query_start").tolist()
    owned = slice(starts[0], starts[-1])
    _write(call, cache, slots, owned)
    out = call.unwritten(q.shape[0], q.shape[1], call.raw("v").shape[2])
    tables, lengths = call.raw("block_table").long(), call.raw("lengths").tolist()
    for request, length in enumerate(lengths):
        first, last = starts[request], starts[request + 1]
        if last <= first:
            continue
        positions = torch.arange(length - (last - first), length)
        window = call.integer("window")
        oldest = max(0, int(positions[0]) - window + 1) if window else 0
        context = torch.arange(oldest, length)
        blocks, offsets = tables[request][context // block_size], context % block_size
        keys, values = (cache[name][blocks, offsets].float() for name in ("k", "v"))
        visible = visibility(positions, context, window)
        out[first:last] = attend(q[first:last], keys, values, visible, **_score(call))
    return [out]


def _write(call: Call, cache: CachePlanes, slots: torch.Tensor, owned: slice) -> None:
    block_size = call.integer("block_size")
    for name in ("k", "v"):
        plane = cache[name]
        rows = call.raw(name)[owned].to(plane.dtype)
        plane[slots[owned] // block_size, slots[owned] % block_size] = rows

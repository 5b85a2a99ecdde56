"""A sequence's way through the prefix cache: what it can reuse, what it publishes.

Contract: at least one token is always left to compute (its logits are wanted), and prompt rows
whose logprobs are still owed are never skipped. Matched blocks are held on return.
"""

import msgspec

from ropeway.runtime.engine.block_pool import BlockPool
from ropeway.runtime.engine.prefix import Digest, extend
from ropeway.runtime.engine.request import Choice


class PrefixMatch(msgspec.Struct, frozen=True):
    """Full blocks to share, and maybe a full block to copy whose last token is computed again."""

    blocks: list[int]
    tail: int | None = None


def match_prefix(pool: BlockPool, seq: Choice, block_size: int, digest: Digest) -> PrefixMatch:
    """The longest cached prefix of `seq`, held for it.

    When the cache knows every token, the last block would have to be written again for the last
    token; it is shared, so it is returned as `tail`, to be copied.
    """
    if not pool.caching:
        return PrefixMatch([])
    limit = _reusable_tokens(seq)
    blocks: list[int] = []
    while (len(blocks) + 1) * block_size <= limit:
        block = _find(pool, seq, len(blocks), block_size, digest)
        if block is None:
            return PrefixMatch(blocks)
        pool.acquire(block)
        blocks.append(block)
    end = (len(blocks) + 1) * block_size
    # A block of one token has nothing to save: its only token is the one to compute.
    if end != seq.num_tokens or limit != end - 1 or block_size == 1:
        return PrefixMatch(blocks)
    tail = _find(pool, seq, len(blocks), block_size, digest)
    if tail is not None:
        pool.acquire(tail)
    return PrefixMatch(blocks, tail)


def _reusable_tokens(seq: Choice) -> int:
    limit = seq.num_tokens - 1
    request = seq.request
    if request.wants_prompt_logprobs and seq.rows_done < request.prompt_tokens - 1:
        limit = min(limit, seq.rows_done)
    return limit


def _find(pool: BlockPool, seq: Choice, index: int, block_size: int, digest: Digest) -> int | None:
    _extend_entries(seq, index + 1, block_size, digest)
    found = pool.find(seq.entries[index])
    if found is None:
        return None
    block, seq.entries[index] = found
    return block


def publish_blocks(pool: BlockPool, seq: Choice, block_size: int, digest: Digest) -> None:
    """Offer the sequence's newly computed full blocks to later requests."""
    full = seq.num_computed // block_size
    if pool.caching:
        _extend_entries(seq, full, block_size, digest)
        for index in range(seq.published, full):
            seq.entries[index] = pool.publish(seq.blocks[index], seq.entries[index])
    seq.published = full


def _extend_entries(seq: Choice, count: int, block_size: int, digest: Digest) -> None:
    while len(seq.entries) < count:
        index = len(seq.entries)
        tokens = seq.tokens[index * block_size : (index + 1) * block_size].tobytes()
        parent = seq.entries[-1] if seq.entries else None
        seq.entries.append(extend(parent, tokens, seq.request.salt, digest))

"""How KV blocks lie in memory on target cpu, in one place for compiler and device.

A block holds 32 tokens of one layer. Its K plane is a panel32 matrix whose columns are the tokens,
its V plane one whose columns are the head dim: the attention kernel runs on the GEMM's tiles. Head
dims are rounded up to 32.
"""

from collections.abc import Iterable

from ropeway.compiler.targets.base import CacheGroupPlan
from ropeway.compiler.targets.cpu.kernel_table import BLOCK_TOKENS
from ropeway.compiler.targets.cpu.plan import ITEM_SIZES, CacheSlot


def plane_block_bytes(heads: int, dim: int, dtype: str) -> int:
    """Bytes of one block of one plane."""
    return heads * -(-dim // 32) * 32 * BLOCK_TOKENS * ITEM_SIZES[dtype]


def block_bytes(slot: CacheSlot) -> int:
    """Bytes of one block of one layer, both planes."""
    return plane_block_bytes(slot.heads, slot.key_dim, slot.dtype) + plane_block_bytes(
        slot.heads, slot.value_dim, slot.dtype
    )


def group_plans(caches: Iterable[CacheSlot]) -> tuple[CacheGroupPlan, ...]:
    """The groups of a program, by number."""
    layers: dict[int, list[int]] = {}
    for slot in caches:
        layers.setdefault(slot.group, []).append(block_bytes(slot))
    return tuple(
        CacheGroupPlan(group, len(sizes), BLOCK_TOKENS, sum(sizes))
        for group, sizes in sorted(layers.items())
    )

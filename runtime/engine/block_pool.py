"""KV blocks: who holds which, what each one caches, and which is evicted next.

Contract: block 0 is null and never handed out. A block is in exactly one place: held (reference
count > 0), cached but unheld (evictable, oldest first) or free. A published block's KV has been
computed and never changes again; whoever wants to write must hold a block alone.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ropeway.compiler.errors import RunError
from ropeway.runtime.engine.prefix import PrefixEntry, same_prefix


class BlockPool:
    """Reference-counted KV blocks with a prefix index and least-recently-used eviction."""

    def __init__(self, num_blocks: int, *, caching: bool = True) -> None:
        """`num_blocks` counts the null block too. Without `caching` nothing is ever published."""
        self.num_blocks = num_blocks
        self.caching = caching
        self._references = [0] * num_blocks
        self._entries: list[PrefixEntry | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, int] = {}

    @property
    def capacity(self) -> int:
        """Blocks that could ever be held at once."""
        return self.num_blocks - 1

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give now, evicting cached ones as needed."""
        return len(self._free) + len(self._evictable)

    @property
    def cached(self) -> int:
        """Published blocks, held or not."""
        return len(self._index)

    def references(self, block: int) -> int:
        """How many tables and pending copies hold `block`."""
        return self._references[block]

    def allocate(self) -> int:
        """Hold one block alone; its content is undefined. RunError when none is available."""
        if self._free:
            block = self._free.pop()
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            self._unpublish(block)
        else:
            raise RunError(f"KV pool: all {self.capacity} blocks are held; the plan overdrew it")
        self._references[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """Hold a published or already held block once more."""
        if self._references[block] == 0:
            del self._evictable[block]
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each block, the last one first.

        Of a prefix the tail is so evicted before the head, which more requests share.
        """
        for block in reversed(blocks):
            count = self._references[block] - 1
            if count < 0:
                raise RunError(f"KV pool: block {block} was released once too often")
            self._references[block] = count
            if count:
                continue
            if self._entries[block] is None:
                self._free.append(block)
            else:
                self._evictable[block] = None

    def publish(self, block: int, entry: PrefixEntry) -> PrefixEntry:
        """Offer a computed, full block to later requests; returns the entry the index keeps.

        When another block already caches the same prefix that one stays. On a digest collision
        with another prefix `entry` is left out.
        """
        if not self.caching or self._entries[block] is not None:
            return entry
        known = self._index.get(entry.digest)
        if known is not None:
            kept = self._entries[known]
            return kept if kept is not None and same_prefix(kept, entry) else entry
        self._index[entry.digest] = block
        self._entries[block] = entry
        return entry

    def find(self, entry: PrefixEntry) -> tuple[int, PrefixEntry] | None:
        """The block that caches exactly this prefix (tokens compared), and the entry kept for it.

        The block isn't held yet: `acquire` it before the next `allocate`.
        """
        block = self._index.get(entry.digest)
        if block is None:
            return None
        kept = self._entries[block]
        if kept is None or not same_prefix(kept, entry):
            return None
        return block, kept

    def reset(self) -> None:
        """Forget every cached prefix; held blocks stay held."""
        for block in list(self._index.values()):
            self._unpublish(block)
        self._free.extend(self._evictable)
        self._evictable.clear()

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Verify the invariants against every table and pending copy; RunError names the fault."""
        expected = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                expected[block] += 1
        free = set(self._free)
        if len(free) != len(self._free) or free & self._evictable.keys():
            raise RunError("KV pool: a block is free twice")
        for block in range(1, self.num_blocks):
            idle = block in free or block in self._evictable
            if expected[block] != self._references[block] or idle == (expected[block] > 0):
                raise RunError(
                    f"KV pool: block {block} has {expected[block]} holders, "
                    f"{self._references[block]} references, idle={idle}"
                )
            if block in free and self._entries[block] is not None:
                raise RunError(f"KV pool: free block {block} is still published")
        if expected[0] or self._references[0]:
            raise RunError("KV pool: the null block is held")

    def _unpublish(self, block: int) -> None:
        entry = self._entries[block]
        if entry is not None:
            del self._index[entry.digest]
            self._entries[block] = None

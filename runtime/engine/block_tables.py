"""The block tables of all running sequences, as the arrays that steps are made from.

Contract: row `slot` lists the blocks of the sequence in that slot, in order of position; entries
past its last block are stale and never read, since a step's lengths end before them. A table is
only appended to, save for copy-on-write of its last block.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BlockTables:
    """int32 [slots, max_blocks], one table for every cache group.

    All groups keep all blocks, so one table of block ids serves them. A group that frees the
    blocks behind its sliding window gets an array of its own here, and `group` then differs.
    """

    def __init__(self, slots: int, max_model_len: int, block_size: int, groups: int = 1) -> None:
        self.block_size = block_size
        self.groups = groups
        self._table = np.zeros((slots, -(-max_model_len // block_size)), np.int32)

    def append(self, slot: int, index: int, block: int) -> None:
        """Put `block` at `index` of the slot's table."""
        self._table[slot, index] = block

    def fill(self, slot: int, blocks: Sequence[int]) -> None:
        """Start the slot's table with `blocks`."""
        self._table[slot, : len(blocks)] = blocks

    def group(self, index: int) -> NDArray[np.int32]:
        """The table of cache group `index`, [slots, max_blocks]; a view, don't write."""
        return self._table

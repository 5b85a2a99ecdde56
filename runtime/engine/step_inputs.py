"""From a plan to the arrays that a device replays.

Contract: true sizes, no padding. `rows` lists, chunk by chunk, first the scored prompt rows and
then the row to sample from, which is the order that the engine's sample batch relies on.
"""

from collections.abc import Sequence

import numpy as np

from ropeway.runtime.devices.base import Int32Array, StepInputs, UInt8Array
from ropeway.runtime.engine.block_tables import BlockTables
from ropeway.runtime.engine.plan import StepPlan


def build_step_inputs(
    plan: StepPlan, tables: BlockTables, peak_only: UInt8Array | None = None
) -> StepInputs:
    """The inputs of one step of `plan`, whose sequences are all in their slots. Copies: nothing
    that happens to the sequences later changes them."""
    chunks = plan.chunks
    slots = np.array([c.seq.slot for c in chunks], np.intp)
    starts = np.array([c.start for c in chunks], np.int32)
    query_start = np.zeros(len(chunks) + 1, np.int32)
    if plan.tokens == len(chunks):
        query_start[:] = np.arange(len(chunks) + 1)
        lengths = starts + 1
        positions, owners = starts, slots
    else:
        counts = np.array([c.count for c in chunks], np.int32)
        np.cumsum(counts, out=query_start[1:])
        lengths = starts + counts
        owners = np.repeat(slots, counts)
        positions = np.arange(plan.tokens, dtype=np.int32)
        positions += np.repeat(starts - query_start[:-1], counts)
    size = tables.block_size
    index, offset = np.divmod(positions, size)
    groups = range(tables.groups)
    return StepInputs(
        ids=_ids(plan),
        positions=positions,
        slots=[tables.group(g)[owners, index] * size + offset for g in groups],
        block_tables=[tables.group(g)[slots] for g in groups],
        query_start=query_start,
        lengths=lengths,
        rows=_rows(plan, query_start),
        peak_only=peak_only,
    )


def _ids(plan: StepPlan) -> np.ndarray:
    ids = np.empty(plan.tokens, np.int32)
    at = 0
    for chunk in plan.chunks:
        seq, start, count = chunk.seq, chunk.start, chunk.count
        if chunk.feed >= 0:
            ids[at] = 0
        elif count == 1 and start == seq.num_tokens - 1:
            ids[at] = seq.last_token
        else:
            ids[at : at + count] = seq.tokens[start : start + count]
        at += count
    return ids


def build_feed(plan: StepPlan, drawn: Sequence[int]) -> Int32Array | None:
    """[T]: for each token the row of the step before that draws it, or -1; None: all are known.

    `drawn` lists that step's rows by draw.
    """
    if not plan.fed:
        return None
    feed = np.full(plan.tokens, -1, np.int32)
    at = 0
    for chunk in plan.chunks:
        if chunk.feed >= 0:
            feed[at] = drawn[chunk.feed]
        at += chunk.count
    return feed


def _rows(plan: StepPlan, query_start: np.ndarray) -> np.ndarray:
    if plan.rows == len(plan.chunks) and plan.scored == 0:
        return query_start[1:] - 1
    rows: list[int] = []
    end = 0
    for chunk in plan.chunks:
        first, stop = chunk.scored
        shift = end - chunk.start
        rows.extend(range(first + shift, stop + shift))
        end += chunk.count
        if chunk.samples:
            rows.append(end - 1)
    return np.array(rows, np.int32)

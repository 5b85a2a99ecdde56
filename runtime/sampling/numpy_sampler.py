"""The sampler in numpy: for the reference target, which needs no compiler.

The same contract and the same random numbers as the native sampler; sums are numpy's, so a draw
may differ where a boundary falls between two roundings, and the two are never mixed in a run.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np

from ropeway.runtime.sampling.batch import (
    F32,
    F64,
    STATUS_ALL_MASKED,
    STATUS_NOT_FINITE,
    STATUS_OK,
    SampleBatch,
    SampleResult,
    SlotReset,
    check_batch,
    empty_result,
    faults_of,
    mask_bits,
    mask_words,
    slot_ids,
)
from ropeway.runtime.sampling.params import GREEDY_BELOW

_WORD = 2**32 - 1
_DRAW_PURPOSE = 0


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al. 2011): four random words, a pure function of counter and key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _WORD, (a >> 32) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """The draw's number in [0, 1), of 53 random bits."""
    words = philox((position, choice, _DRAW_PURPOSE, 0), (seed & _WORD, seed >> 32))
    return ((words[0] >> 5) * 2.0**26 + (words[1] >> 6)) / 2.0**53


class NumpySampler:
    """Samples batches of a model with `vocab_size` logits, in Python; owns the penalty slots."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._prompts: dict[int, frozenset[int]] = {}
        self._counts: dict[int, Counter[int]] = {}

    def close(self) -> None:
        """Frees the penalty slots."""
        self._prompts.clear()
        self._counts.clear()

    def sample(
        self, logits: F32, batch: SampleBatch, run: Callable[[int], None] | None = None
    ) -> SampleResult:
        """Answers every row of the batch; `logits` is f32 [L, V]. `run` is the native sampler's.

        Raises RunError for a batch that doesn't fit the logits; a row that can't be sampled is a
        fault of the result.
        """
        del run
        check_batch(logits, batch, self._vocab_size)
        for reset in batch.resets:
            self._reset(reset)
        result, status = empty_result(batch)
        for i, row in enumerate(batch.rows):
            raw = logits[row["row"]].astype(np.float64)
            status[i] = self._sample_row(raw, row, batch, result, i)
        return result.with_faults(faults_of(status, batch.requests))

    def _reset(self, reset: SlotReset) -> None:
        prompt = slot_ids(reset.prompt, self._vocab_size)
        output = slot_ids(reset.output, self._vocab_size)
        self._prompts.pop(reset.slot, None)
        self._counts.pop(reset.slot, None)
        if prompt.size or output.size:
            self._prompts[reset.slot] = frozenset(prompt.tolist())
            self._counts[reset.slot] = Counter(output.tolist())

    def _sample_row(
        self, raw: F64, row: np.void, batch: SampleBatch, result: SampleResult, index: int
    ) -> int:
        if np.isnan(raw).any() or raw.max() == np.inf:
            return STATUS_NOT_FINITE
        if raw.max() == -np.inf:
            return STATUS_ALL_MASKED
        token = int(row["target"])
        if token < 0:
            adjusted = self._adjust(raw, row, batch)
            if adjusted.max() == -np.inf:
                return STATUS_ALL_MASKED
            token = _draw(adjusted, row)
            if int(row["slot"]) in self._counts:
                self._counts[int(row["slot"])][token] += 1
        result.tokens[index] = token
        if row["want_logprob"]:
            _report(raw, row, result, index, token)
        return STATUS_OK

    def _adjust(self, raw: F64, row: np.void, batch: SampleBatch) -> F64:
        y = raw.copy()
        if row["mask_begin"] >= 0:
            words = batch.masks[row["mask_begin"] :][: mask_words(self._vocab_size)]
            y[~mask_bits(words, self._vocab_size)] = -np.inf
        biased = slice(row["bias_begin"], row["bias_begin"] + row["bias_count"])
        np.add.at(y, batch.bias_ids[biased], batch.bias_values[biased])
        y[batch.banned[row["ban_begin"] : row["ban_begin"] + row["ban_count"]]] = -np.inf
        counts = self._counts.get(int(row["slot"]))
        if counts is not None:
            seen = self._prompts[int(row["slot"])] | set(counts)
            ids = np.fromiter(seen, np.int64, len(seen))
            drawn = np.array([counts[int(i)] for i in ids], np.float64)
            value = y[ids]
            factor = row["repetition_penalty"]
            value = np.where(value > 0, value / factor, value * factor)
            y[ids] = (
                value - row["frequency_penalty"] * drawn - row["presence_penalty"] * (drawn > 0)
            )
        return y.astype(np.float32).astype(np.float64)


def _order(y: F64) -> np.ndarray:
    """Ids, most likely first, ties by id."""
    return np.argsort(-y, kind="stable")


def _draw(y: F64, row: np.void) -> int:
    if row["temperature"] < GREEDY_BELOW:
        return int(np.argmax(y))
    # In float64 a far smaller logit's weight underflows to 0, which is what is meant.
    with np.errstate(under="ignore"):
        weights = np.exp((y - y.max()) * (1.0 / row["temperature"]))
    weights[weights < row["min_p"]] = 0.0
    ids = np.arange(y.size)
    by_count = 0 < row["top_k"] < y.size
    if by_count or row["top_p"] < 1.0:
        ids = _order(y)
        if by_count:
            ids = ids[: row["top_k"]]
        ids = ids[weights[ids] > 0]
        mass = np.cumsum(weights[ids])
        if row["top_p"] < 1.0:
            ids = ids[np.concatenate(([True], mass[:-1] < row["top_p"] * mass[-1]))]
        if not by_count:
            ids = np.sort(ids)
    running = np.cumsum(weights[ids])
    goal = uniform(int(row["seed"]), int(row["choice"]), int(row["position"])) * running[-1]
    return int(ids[np.searchsorted(running, goal, side="right")])


def _report(raw: F64, row: np.void, result: SampleResult, index: int, token: int) -> None:
    peak = raw.max()
    with np.errstate(under="ignore"):
        logprobs = raw - peak - np.log(np.exp(raw - peak).sum())
    result.logprobs[index] = logprobs[token]
    ahead = (raw > raw[token]).sum() + (raw[:token] == raw[token]).sum()
    result.ranks[index] = 1 + ahead
    if row["top_count"]:
        ids = _order(raw)[: row["top_count"]]
        begin = row["top_begin"]
        result.top_ids[begin : begin + ids.size] = ids
        result.top_logprobs[begin : begin + ids.size] = logprobs[ids]

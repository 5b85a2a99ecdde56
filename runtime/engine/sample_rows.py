"""From a plan to the rows that the device samples, and back to logprobs.

Contract: rows come in the order of StepInputs.rows, with n draws from the one row before a fork;
penalty slots are refilled whenever a sequence starts, or starts again after a preemption.
"""

from collections.abc import Sequence

import numpy as np

from ropeway.compiler.errors import RequestError
from ropeway.runtime.engine.messages import GenerationRequest, TokenLogprobs
from ropeway.runtime.engine.plan import Chunk, StepPlan
from ropeway.runtime.engine.request import Choice
from ropeway.runtime.sampling.batch import (
    I32,
    RowSettings,
    SampleBatch,
    SampleResult,
    SlotReset,
    WantedRow,
    mask_words,
)
from ropeway.runtime.sampling.params import derive_seed
from ropeway.runtime.structured.grammar import Grammar, Matcher


class RequestSampling:
    """How one request is sampled: settings and matcher per choice, and the prompt's logprobs."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        vocab_size: int,
        seed: int,
        eos_ids: Sequence[int],
        grammar: Grammar | None = None,
    ) -> None:
        """Raises RequestError when the params don't fit the vocabulary, or the grammar of its
        structured_outputs isn't there."""
        if grammar is None and request.params.structured_outputs is not None:
            raise RequestError("structured_outputs", "its grammar must be compiled first")
        self.request = request
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.reported = False  # whether the prompt's logprobs went out
        self._vocab_size = vocab_size
        self._seed = seed
        self._eos_ids = eos_ids
        self._settings = [self._make(0)]
        self._grammar = grammar
        self._matchers: dict[int, Matcher] = {}

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        *,
        vocab_size: int,
        engine_seed: int,
        arrival: int,
        eos_ids: Sequence[int],
        grammar: Grammar | None = None,
    ) -> "RequestSampling":
        """With the request's own seed, or one derived from the engine's and the arrival number."""
        seed = request.params.seed
        if seed is None:
            seed = derive_seed(engine_seed, arrival)
        return cls(request, vocab_size=vocab_size, seed=seed, eos_ids=eos_ids, grammar=grammar)

    def settings(self, choice: int) -> RowSettings:
        """The settings of one choice; made when first asked for."""
        while len(self._settings) <= choice:
            self._settings.append(self._make(len(self._settings)))
        return self._settings[choice]

    @property
    def constrained(self) -> bool:
        """Whether a token must be committed before the next one can be drawn."""
        return self._grammar is not None

    def matcher(self, choice: int) -> Matcher | None:
        """What follows one choice's text; None where any will do."""
        if self._grammar is None:
            return None
        if choice not in self._matchers:
            self._matchers[choice] = self._grammar.matcher()
        return self._matchers[choice]

    def next_mask(self, choice: int) -> I32 | None:
        """The tokens that may follow those committed to one choice."""
        matcher = self.matcher(choice)
        if matcher is None:
            return None
        words = np.empty(mask_words(self._vocab_size), np.int32)
        matcher.fill(words)
        return words

    def _make(self, choice: int) -> RowSettings:
        return RowSettings.of(
            self.request.params,
            vocab_size=self._vocab_size,
            seed=self._seed,
            choice=choice,
            eos_ids=self._eos_ids,
            request=self.request.request_id,
        )


class SampleRows:
    """Builds each step's sample batch; keeps track of the device's penalty slots."""

    def __init__(self, slots: int) -> None:
        """`slots` sequences run at most; slots beyond are used for the draws of a fork."""
        self._slots = slots
        self._filled: dict[int, tuple[Choice, int]] = {}  # slot -> whose, in which of its lives
        self._borrowed: list[int] = []

    def build(
        self, plan: StepPlan, requests: dict[str, RequestSampling]
    ) -> tuple[SampleBatch, list[int]]:
        """The batch, and which of its rows are draws (the others score a prompt token)."""
        wanted: list[WantedRow] = []
        drawn: list[int] = []
        resets = [SlotReset(slot) for slot in self._borrowed]
        self._borrowed = []
        row = 0
        for chunk in plan.chunks:
            seq = chunk.seq
            sampling = requests[seq.request.request_id]
            first, stop = chunk.scored
            if first < stop:
                self._score(wanted, sampling, seq, range(first, stop), row)
                row += stop - first
            if chunk.samples:
                drawn.extend(range(len(wanted), len(wanted) + chunk.samples))
                self._draw(wanted, resets, sampling, chunk, row)
                row += 1
        return SampleBatch.build(wanted, resets), drawn

    def _score(
        self,
        wanted: list[WantedRow],
        sampling: RequestSampling,
        seq: Choice,
        positions: range,
        row: int,
    ) -> None:
        settings = sampling.settings(0)
        for at, position in enumerate(positions, row):
            target = int(seq.tokens[position + 1])
            wanted.append(WantedRow(settings, at, position + 1, target=target))

    def _draw(
        self,
        wanted: list[WantedRow],
        resets: list[SlotReset],
        sampling: RequestSampling,
        chunk: Chunk,
        row: int,
    ) -> None:
        seq = chunk.seq
        position = chunk.start + chunk.count
        generated = position - seq.request.prompt_tokens
        slot = -1
        for choice in range(seq.choice, seq.choice + chunk.samples):
            settings = sampling.settings(choice)
            if settings.needs_slot:
                slot = self._penalty_slot(seq, choice, resets)
            mask = sampling.next_mask(choice)
            wanted.append(WantedRow(settings, row, position, generated, slot, mask=mask))

    def _penalty_slot(self, seq: Choice, choice: int, resets: list[SlotReset]) -> int:
        if choice != seq.choice:
            # This choice has no slot before its fork; its own is filled when it next draws.
            slot = self._slots + len(self._borrowed)
            self._borrowed.append(slot)
            resets.append(_reset(slot, seq))
            return slot
        life = (seq, seq.preemptions)
        if self._filled.get(seq.slot) != life:
            self._filled[seq.slot] = life
            resets.append(_reset(seq.slot, seq))
        return seq.slot


def _reset(slot: int, seq: Choice) -> SlotReset:
    tokens = seq.tokens[: seq.num_tokens].tolist()
    prompt = seq.request.prompt_tokens
    return SlotReset(slot, tokens[:prompt], tokens[prompt:])


def token_logprobs(result: SampleResult, index: int) -> TokenLogprobs:
    """The logprobs of one row of the answer."""
    ids, logprobs = result.top(index)
    return TokenLogprobs(
        int(result.tokens[index]),
        float(result.logprobs[index]),
        int(result.ranks[index]),
        ids.tolist(),
        logprobs.tolist(),
    )

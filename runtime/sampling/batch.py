"""What a device is asked to sample in one step, and what it answers.

A row is one row of the step's logits. It is either drawn (target -1) or scored: a prompt logprob
row names the token whose logprob is wanted. The rows lie packed as the native sampler reads them
(`ROW` mirrors `rw_sample_row` in runtime/kernels/sampling.h).
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from ropeway.compiler.errors import RunError
from ropeway.runtime.sampling.params import GREEDY_BELOW, SamplingParams

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

ROW = np.dtype(
    [
        ("seed", "<u8"),
        ("temperature", "<f8"),
        ("top_p", "<f8"),
        ("min_p", "<f8"),
        ("repetition_penalty", "<f8"),
        ("presence_penalty", "<f8"),
        ("frequency_penalty", "<f8"),
        ("top_begin", "<i8"),  # where this row's alternatives start in top_ids / top_logprobs
        ("mask_begin", "<i8"),  # the word of masks where this row's mask starts; -1: none
        ("top_count", "<i4"),
        ("want_logprob", "<i4"),
        ("top_k", "<i4"),
        ("row", "<i4"),  # row of the logits matrix
        ("target", "<i4"),  # -1: draw; else score this token
        ("position", "<i4"),
        ("choice", "<i4"),
        ("slot", "<i4"),  # penalty state, -1: none
        ("bias_begin", "<i4"),
        ("bias_count", "<i4"),
        ("ban_begin", "<i4"),
        ("ban_count", "<i4"),
    ]
)


class RowSettings(msgspec.Struct, frozen=True):
    """All of one sequence's sampling that doesn't change from step to step; made once."""

    request: str
    params: SamplingParams
    bias_ids: I32
    bias_values: F64
    banned: I32
    allowed: I32 | None  # mask of allowed_token_ids
    vocab_size: int
    template: bytes
    prompt_template: bytes

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        *,
        vocab_size: int,
        seed: int,
        choice: int = 0,
        eos_ids: Sequence[int] = (),
        request: str = "",
    ) -> "RowSettings":
        """`seed` is the request's own or `derive_seed`'s; `choice` counts the n choices from 0.

        Raises RequestError when the params don't fit the vocabulary.
        """
        params.check_vocabulary(vocab_size, eos_ids)
        bias = params.logit_bias or {}
        return cls(
            request=request,
            params=params,
            bias_ids=np.fromiter(bias.keys(), np.int32, len(bias)),
            bias_values=np.fromiter(bias.values(), np.float64, len(bias)),
            banned=np.array(
                [t for t in params.banned_before_min_tokens(eos_ids) if t < vocab_size], np.int32
            ),
            allowed=_mask_of(params.allowed_token_ids, vocab_size),
            vocab_size=vocab_size,
            template=_template(params, seed, choice, params.logprobs, vocab_size),
            prompt_template=_template(params, seed, choice, params.prompt_logprobs, vocab_size),
        )

    @property
    def needs_slot(self) -> bool:
        """Whether drawing needs a penalty slot."""
        return self.params.uses_penalties


def _template(
    params: SamplingParams, seed: int, choice: int, logprobs: int | None, vocab_size: int
) -> bytes:
    row = np.zeros(1, ROW)
    row["seed"] = seed % 2**64
    for name in ("temperature", "top_p", "min_p"):
        row[name] = getattr(params, name)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        row[name] = getattr(params, name)
    row["top_k"] = min(max(params.top_k, 0), vocab_size)
    row["choice"] = choice
    row["target"] = -1
    row["slot"] = -1
    row["mask_begin"] = -1
    row["want_logprob"] = logprobs is not None
    row["top_count"] = vocab_size if logprobs == -1 else (logprobs or 0)
    return row.tobytes()


class WantedRow(msgspec.Struct, frozen=True):
    """One row to sample in this step.

    `row` indexes the step's logits; `position` is the index that the drawn token will have in its
    sequence (prompt included), a key of the random numbers; `generated` counts the tokens drawn so
    far (for min_tokens). `slot` is the sequence's penalty slot, used when `settings.needs_slot`.
    With `target` the row only scores that token (prompt logprobs). `mask`, i32 [ceil(V / 32)], has
    a bit for each token that a grammar allows next.
    """

    settings: RowSettings
    row: int
    position: int
    generated: int = 0
    slot: int = -1
    target: int = -1
    mask: I32 | None = None

    @property
    def drawable(self) -> I32 | None:
        """The mask of what the grammar and allowed_token_ids leave; None: everything."""
        allowed = self.settings.allowed
        if self.target >= 0:
            return None
        if self.mask is None or allowed is None:
            return allowed if self.mask is None else self.mask
        return self.mask & allowed


class SlotReset(msgspec.Struct, frozen=True):
    """Refills a penalty slot before the step's rows are sampled.

    Sent when a sequence that needs a slot first samples, and again after a preemption with the
    tokens it had drawn by then; the sampler counts the tokens it draws by itself. Empty `prompt`
    and `output` free the slot's memory.
    """

    slot: int
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()


class SampleBatch(msgspec.Struct, frozen=True):
    """The rows of one step: `rows` is ROW[n]; ids and values are flat and cut by the rows."""

    rows: np.ndarray
    requests: tuple[str, ...]
    bias_ids: I32
    bias_values: F64
    banned: I32
    masks: I32
    top_total: int
    resets: tuple[SlotReset, ...] = ()

    def __len__(self) -> int:
        return len(self.requests)

    def peak_only(self, count: int) -> npt.NDArray[np.uint8]:
        """[count]: 1 for each of the step's rows of logits of which only the largest is read."""
        rows = self.rows
        reads_more = (
            (rows["temperature"] >= GREEDY_BELOW)
            | (rows["want_logprob"] != 0)
            | (rows["target"] >= 0)
            | (rows["slot"] >= 0)
            | (rows["bias_count"] > 0)
            | (rows["ban_count"] > 0)
            | (rows["mask_begin"] >= 0)
        )
        only = np.ones(count, np.uint8)
        only[rows["row"][reads_more]] = 0
        return only

    @classmethod
    def build(cls, wanted: Sequence[WantedRow], resets: Iterable[SlotReset] = ()) -> "SampleBatch":
        """Packs the rows. Raises RunError when a row with penalties has no slot of its own."""
        scored = [w.target >= 0 for w in wanted]
        rows = np.frombuffer(
            bytearray().join(
                w.settings.prompt_template if s else w.settings.template
                for w, s in zip(wanted, scored, strict=True)
            ),
            ROW,
        )
        rows["row"] = [w.row for w in wanted]
        rows["position"] = [w.position for w in wanted]
        rows["target"] = [w.target for w in wanted]
        _fill_slots(rows, wanted)
        top_total = 0
        if rows["top_count"].any():
            ends = np.cumsum(rows["top_count"], dtype=np.int64)
            rows["top_begin"] = ends - rows["top_count"]
            top_total = int(ends[-1])
        biased = [w.settings if not s else None for w, s in zip(wanted, scored, strict=True)]
        bias_ids, bias_values = _pack_bias(rows, biased)
        masks = [w.drawable for w in wanted]
        return cls(
            rows=rows,
            requests=tuple(w.settings.request for w in wanted),
            bias_ids=bias_ids,
            bias_values=bias_values,
            banned=_pack_bans(rows, wanted, masks),
            masks=_pack_masks(rows, masks),
            top_total=top_total,
            resets=tuple(resets),
        )


def _fill_slots(rows: np.ndarray, wanted: Sequence[WantedRow]) -> None:
    used: set[int] = set()
    for i, want in enumerate(wanted):
        if not want.settings.needs_slot or want.target >= 0:
            continue
        if want.slot < 0 or want.slot in used:
            why = "no penalty slot" if want.slot < 0 else f"penalty slot {want.slot} twice"
            raise RunError(f"request {want.settings.request} was scheduled with {why}")
        used.add(want.slot)
        rows["slot"][i] = want.slot


_NO_IDS: I32 = np.zeros(0, np.int32)
_NO_VALUES: F64 = np.zeros(0, np.float64)


def _pack_bias(rows: np.ndarray, settings: Sequence[RowSettings | None]) -> tuple[I32, F64]:
    parts = [(i, s) for i, s in enumerate(settings) if s is not None and s.bias_ids.size]
    if not parts:
        return _NO_IDS, _NO_VALUES
    begin = 0
    for i, part in parts:
        rows["bias_begin"][i] = begin
        rows["bias_count"][i] = part.bias_ids.size
        begin += part.bias_ids.size
    return (
        np.concatenate([s.bias_ids for _, s in parts]),
        np.concatenate([s.bias_values for _, s in parts]),
    )


def _pack_bans(rows: np.ndarray, wanted: Sequence[WantedRow], masks: Sequence[I32 | None]) -> I32:
    parts = [
        (i, w.settings.banned)
        for i, (w, mask) in enumerate(zip(wanted, masks, strict=True))
        if w.settings.banned.size
        and w.generated < w.settings.params.min_tokens
        and w.target < 0
        and not _only_allows(mask, w.settings.banned)
    ]
    if not parts:
        return _NO_IDS
    begin = 0
    for i, ids in parts:
        rows["ban_begin"][i] = begin
        rows["ban_count"][i] = ids.size
        begin += ids.size
    return np.concatenate([ids for _, ids in parts])


def _only_allows(mask: I32 | None, ids: I32) -> bool:
    """Whether nothing but `ids` can be drawn: then a text that is complete ends before
    min_tokens, since whatever follows would break its form."""
    if mask is None:
        return False
    rest = mask.copy()
    np.bitwise_and.at(rest, ids // 32, ~_bit_of(ids))
    return not rest.any()


def _pack_masks(rows: np.ndarray, masks: Sequence[I32 | None]) -> I32:
    parts = [(i, mask) for i, mask in enumerate(masks) if mask is not None]
    if not parts:
        return _NO_IDS
    begin = 0
    for i, mask in parts:
        rows["mask_begin"][i] = begin
        begin += mask.size
    return np.concatenate([mask for _, mask in parts])


def mask_words(vocab_size: int) -> int:
    """How many words a mask of `vocab_size` tokens has."""
    return -(-vocab_size // 32)


def mask_bits(words: I32, vocab_size: int) -> npt.NDArray[np.bool_]:
    """[V]: whether each token's bit is set."""
    bits = np.unpackbits(words.astype("<i4").view(np.uint8), count=vocab_size, bitorder="little")
    return bits.astype(np.bool_)


def _bit_of(ids: I32) -> I32:
    return (np.uint32(1) << (ids % 32).astype(np.uint32)).view(np.int32)


def _mask_of(ids: Sequence[int] | None, vocab_size: int) -> I32 | None:
    if ids is None:
        return None
    mask = np.zeros(mask_words(vocab_size), np.int32)
    array = np.array(ids, np.int32)
    np.bitwise_or.at(mask, array // 32, _bit_of(array))
    return mask


class RowFault(msgspec.Struct, frozen=True):
    """A row that couldn't be sampled: its index in the batch, its request and why."""

    index: int
    request: str
    message: str


class SampleResult(msgspec.Struct, frozen=True):
    """One answer per row of the batch.

    `tokens` i32[n]: drawn, or the target. `logprobs` f32[n] and `ranks` i32[n] (1: most likely,
    ties by id) are of the raw model distribution, NaN and 0 where not asked for. Row i's
    alternatives, most likely first, are top_ids / top_logprobs[top_begin[i]:][:top_count[i]].
    A row listed in `faults` has token -1; its neighbours are right.
    """

    tokens: I32
    logprobs: F32
    ranks: I32
    top_ids: I32
    top_logprobs: F32
    top_begin: npt.NDArray[np.int64]
    top_count: I32
    faults: tuple[RowFault, ...] = ()

    def top(self, index: int) -> tuple[I32, F32]:
        """Ids and logprobs of row `index`'s alternatives, most likely first."""
        begin = int(self.top_begin[index])
        end = begin + int(self.top_count[index])
        return self.top_ids[begin:end], self.top_logprobs[begin:end]

    def with_faults(self, faults: "tuple[RowFault, ...]") -> "SampleResult":
        """The same answers with `faults` beside them."""
        return msgspec.structs.replace(self, faults=faults)

    def check(self) -> None:
        """Raises RunError for the first fault, naming its request."""
        if self.faults:
            fault = self.faults[0]
            raise RunError(f"request {fault.request}: {fault.message}")


STATUS_OK = 0
STATUS_NOT_FINITE = 1
STATUS_ALL_MASKED = 2
STATUS_NO_MEMORY = 3
STATUS_NO_LOGITS = 4

_MESSAGES = {
    STATUS_NOT_FINITE: "the model's logits hold NaN or +inf: the weights or a kernel are damaged, "
    "run `ropeway inspect` on the artifact or load it with verify='full'",
    STATUS_ALL_MASKED: "no token is left to draw: the model's logits, the ids banned before "
    "min_tokens, structured_outputs and allowed_token_ids exclude all of them; ask for less",
    STATUS_NO_LOGITS: "the step didn't keep the logits that this request is sampled from: a fault "
    "of the engine, please report it",
    STATUS_NO_MEMORY: "out of memory while sampling: lower max_num_seqs or kv_cache_memory",
}


def faults_of(status: I32, requests: Sequence[str]) -> tuple[RowFault, ...]:
    """The faults that a sampler's per-row status codes stand for."""
    return tuple(
        RowFault(i, requests[i], _MESSAGES[int(status[i])]) for i in np.flatnonzero(status).tolist()
    )


def empty_result(batch: SampleBatch) -> tuple[SampleResult, I32]:
    """The arrays that a sampler fills, and a status i32[n] beside them."""
    count = len(batch)
    result = SampleResult(
        tokens=np.full(count, -1, np.int32),
        logprobs=np.full(count, np.nan, np.float32),
        ranks=np.zeros(count, np.int32),
        top_ids=np.zeros(batch.top_total, np.int32),
        top_logprobs=np.zeros(batch.top_total, np.float32),
        top_begin=batch.rows["top_begin"],
        top_count=batch.rows["top_count"],
    )
    return result, np.zeros(count, np.int32)


def check_batch(logits: F32, batch: SampleBatch, vocab_size: int) -> None:
    """Raises RunError unless every row and target of the batch lies in `logits` f32 [L, V]."""
    if logits.ndim != 2 or logits.dtype != np.float32 or logits.shape[1] != vocab_size:
        raise RunError(
            f"the sampler takes float32 logits of width {vocab_size}, "
            f"got {logits.dtype} {logits.shape}"
        )
    if logits.strides[1] != logits.itemsize:
        raise RunError("the sampler takes logits whose columns are adjacent")
    if not len(batch):
        return
    rows = batch.rows["row"]
    if rows.min() < 0 or rows.max() >= logits.shape[0]:
        raise RunError(f"a row to sample lies outside the step's {logits.shape[0]} rows of logits")
    masks = batch.rows["mask_begin"].max()
    if masks >= 0 and masks + mask_words(vocab_size) > batch.masks.size:
        raise RunError(f"a mask is shorter than the vocabulary of {vocab_size}")
    if batch.rows["target"].max() >= vocab_size:
        raise RunError(f"a prompt token to score lies outside the vocabulary of {vocab_size}")


def slot_ids(ids: Sequence[int], vocab_size: int) -> I32:
    """Token ids of a slot as an array; RunError when one lies outside the vocabulary."""
    array = np.ascontiguousarray(ids, np.int32)
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        raise RunError(f"a penalized token lies outside the vocabulary of {vocab_size}")
    return array

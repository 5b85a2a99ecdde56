"""What a caller may ask of sampling: SamplingParams, checked alone and against a vocabulary."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from ropeway.compiler.errors import RequestError
from ropeway.runtime.sampling.structured import StructuredOutputs

MAX_CHOICES = 1024
MAX_PROMPT_LOGPROBS = 1024  # a step scores thousands of prompt rows at once
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
MAX_LOGIT_BIAS = 100.0
GREEDY_BELOW = 1e-5  # temperatures that can't be told from 0, as in vLLM


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to pick and when to stop; names and defaults as vLLM users know them.

    The defaults sample at temperature 1 and stop after 16 tokens; `ropeway generate` is greedy and
    gives 128.

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off. `max_tokens` None
    generates up to the model's length. `seed` None draws from the engine's own seed (so does -1).
    `logprobs` is how many alternatives to report beside the chosen token (0: only that one, -1:
    the whole vocabulary), of the raw model distribution; `prompt_logprobs` (up to 1024) the same
    for the prompt. `stop` takes one string or several; `logit_bias` maps a token id to -100..100.
    `min_tokens` keeps the end-of-sequence and stop ids from being drawn, and stop strings from
    matching, before that many tokens. `structured_outputs` is the form that the text must have; a
    text that is complete ends with "stop" at once, whatever min_tokens and ignore_eos say.
    `allowed_token_ids` are the only ids that can be drawn.

    Raises RequestError, with the field's name, for any value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_distribution()
        self._normalize_stops()
        self._normalize_bias()
        self._check_constraints()
        for field in (
            "ignore_eos",
            "skip_special_tokens",
            "include_stop_str_in_output",
            "detokenize",
        ):
            if not isinstance(getattr(self, field), bool):
                _refuse(field, getattr(self, field), "must be true or false")
        if self.stop_strings and not self.detokenize:
            raise RequestError("stop", "stop strings need text: leave detokenize on")

    def _check_counts(self) -> None:
        _check_int("n", self.n, 1, MAX_CHOICES)
        _check_int("top_k", self.top_k, -1, None, "must be a count, or 0 or -1 for all tokens")
        _check_int("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
            if self.min_tokens > self.max_tokens:
                _refuse("min_tokens", self.min_tokens, f"exceeds max_tokens {self.max_tokens}")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, -1, None)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_PROMPT_LOGPROBS)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
            if self.seed == -1:
                msgspec.structs.force_setattr(self, "seed", None)

    def _check_distribution(self) -> None:
        _check_float("temperature", self.temperature, 0.0, math.inf)
        _check_float("top_p", self.top_p, 0.0, 1.0, "must be above 0, at most 1 (1 is off)")
        if self.top_p == 0.0:
            _refuse("top_p", self.top_p, "must be above 0 (use temperature=0 for greedy)")
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.repetition_penalty == 0.0:
            _refuse("repetition_penalty", self.repetition_penalty, "must be above 0 (1 is off)")
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)

    def _normalize_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        strings = _as_tuple("stop", stop, "one string or a list of strings")
        if len(strings) > MAX_STOP_STRINGS:
            _refuse("stop", f"{len(strings)} strings", f"at most {MAX_STOP_STRINGS}")
        for text in strings:
            if not isinstance(text, str) or not text:
                _refuse("stop", text, "each stop must be a string that isn't empty")
            if len(text) > MAX_STOP_LENGTH:
                _refuse("stop", f"{len(text)} characters", f"at most {MAX_STOP_LENGTH}")
        msgspec.structs.force_setattr(self, "stop", tuple(dict.fromkeys(strings)))
        ids = _as_tuple("stop_token_ids", self.stop_token_ids, "a list of token ids")
        for token in ids:
            _check_int("stop_token_ids", token, 0, 2**31 - 1)
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(dict.fromkeys(ids)))

    def _normalize_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            _refuse("logit_bias", self.logit_bias, "must map token ids to numbers")
        for token, value in self.logit_bias.items():
            _check_int("logit_bias", token, 0, 2**31 - 1)
            _check_float("logit_bias", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        # An own copy: the caller's dict may change after it was checked.
        ordered = dict(sorted((int(t), float(v)) for t, v in self.logit_bias.items()))
        msgspec.structs.force_setattr(self, "logit_bias", ordered or None)

    def _check_constraints(self) -> None:
        if self.allowed_token_ids is not None:
            ids = _as_tuple("allowed_token_ids", self.allowed_token_ids, "a list of token ids")
            for token in ids:
                _check_int("allowed_token_ids", token, 0, 2**31 - 1)
            if not ids:
                _refuse("allowed_token_ids", [], "give at least one id, or None for all")
            msgspec.structs.force_setattr(self, "allowed_token_ids", tuple(sorted(set(ids))))
        structured: Any = self.structured_outputs
        if structured is not None and not isinstance(structured, StructuredOutputs):
            _refuse("structured_outputs", structured, "must be a StructuredOutputs")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings in the order given, without repeats."""
        stop = self.stop
        return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The stop token ids in the order given, without repeats."""
        return tuple(self.stop_token_ids or ())

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without drawing."""
        return self.temperature < GREEDY_BELOW

    @property
    def uses_penalties(self) -> bool:
        """Whether token counts of the sequence change its distribution (a penalty slot is used)."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def banned_before_min_tokens(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        """Ids that can't be drawn before `min_tokens` tokens: the end ids and the stop ids.

        The end ids count even under ignore_eos, as in vLLM.
        """
        if self.min_tokens == 0:
            return ()
        return tuple(dict.fromkeys((*eos_ids, *self.stop_ids)))

    def check_vocabulary(self, vocab_size: int, eos_ids: Sequence[int] = ()) -> None:
        """Raises RequestError when a token id or a count doesn't fit `vocab_size` ids."""
        for field, ids in (
            ("stop_token_ids", self.stop_ids),
            ("logit_bias", self.logit_bias or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        ):
            for token in ids:
                if token >= vocab_size:
                    _refuse(field, token, f"the vocabulary ends at {vocab_size - 1}")
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(self, field)
            if count is not None and count > vocab_size:
                _refuse(field, count, f"the vocabulary has only {vocab_size} tokens")
        banned = self.banned_before_min_tokens(eos_ids)
        if len(banned) >= vocab_size:
            _refuse("min_tokens", self.min_tokens, "every token of the vocabulary is a stop token")
        if self.allowed_token_ids and set(self.allowed_token_ids) <= set(banned):
            _refuse("min_tokens", self.min_tokens, "every allowed token is a stop token")


def derive_seed(engine_seed: int, arrival: int) -> int:
    """The 64-bit seed of a request that gave none: a hash of the engine's seed and its turn."""
    text = f"ropeway request seed {engine_seed} {arrival}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _as_tuple(field: str, value: Any, expected: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(
        value, Sequence | set | frozenset
    ):
        _refuse(field, value, f"must be {expected}")
    return tuple(value)


def _check_int(field: str, value: Any, low: int, high: int | None, expected: str = "") -> None:
    """`expected` says it better than the bounds do."""
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(field, value, "must be a whole number")
    if value < low or (high is not None and value > high):
        span = f"must be at least {low}" + ("" if high is None else f", at most {high}")
        _refuse(field, value, expected or span)


def _check_float(field: str, value: Any, low: float, high: float, expected: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
        _refuse(field, value, "must be a finite number")
    if not low <= value <= high:
        span = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        _refuse(field, value, expected or f"must be {span}")


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def _refuse(field: str, value: Any, why: str) -> NoReturn:
    try:
        shown = repr(value)
    except ValueError:  # Python prints no int of over 4,300 digits
        shown = "a huge number"
    raise RequestError(field, f"got {shown if len(shown) <= 80 else shown[:77] + '...'}: {why}")

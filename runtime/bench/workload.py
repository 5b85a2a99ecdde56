"""A fixed workload: token-id prompts drawn by a small published generator, so that any engine
can be given exactly the same work.

The generator is the 64-bit linear congruential one of Knuth's MMIX (multiplier
6364136223846793005, increment 1442695040888963407); nothing depends on numpy's or Python's
random numbers.
"""

from pathlib import Path

import msgspec

from ropeway.compiler.errors import InputError

_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407
_SEED = 20240601
_FIRST_ID = 100  # ids below are special tokens in most vocabularies
_END_ID = 49000


class Workload(msgspec.Struct):
    """Prompts as token ids; `gen` new tokens are asked for each."""

    gen: int
    single: list[int]
    prefill1024: list[int]
    batch8: list[list[int]]
    batch32: list[list[int]]
    server: list[list[int]]
    agree: list[list[int]] = []
    agree_text: list[str] = []

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, the new ones included."""
        measured = [self.single, *self.batch8, *self.batch32]
        return max(
            len(self.prefill1024) + 2,
            max(map(len, measured)) + self.gen,
            max(map(len, self.agree), default=0) + 24,
        )


class TokenIds:
    """Token ids of a vocabulary, always the same: ids in [100, min(vocab_size, 49000)), or any id
    of a vocabulary that has no more than a hundred."""

    def __init__(self, vocab_size: int) -> None:
        self._state = _SEED
        self._first = _FIRST_ID if vocab_size > _FIRST_ID else 0
        self._count = min(vocab_size, _END_ID) - self._first

    def below(self, bound: int) -> int:
        """A number in 0..bound - 1."""
        self._state = (self._state * _MULTIPLIER + _INCREMENT) % (1 << 64)
        return (self._state >> 33) % bound

    def take(self, count: int) -> list[int]:
        """The next `count` ids."""
        return [self._first + self.below(self._count) for _ in range(count)]


def make_workload(vocab_size: int, gen: int = 128) -> Workload:
    """The workload for a vocabulary: ids in [100, min(vocab_size, 49000))."""
    if vocab_size <= _FIRST_ID:
        raise InputError(
            f"vocabulary of {vocab_size} ids: the built-in workload needs more than {_FIRST_ID}; "
            "give --workload FILE"
        )
    ids = TokenIds(vocab_size)

    def mixed(count: int) -> list[list[int]]:
        return [ids.take(64 + ids.below(129)) for _ in range(count)]

    return Workload(
        gen=gen,
        single=ids.take(128),
        prefill1024=ids.take(1024),
        batch8=mixed(8),
        batch32=mixed(32),
        server=mixed(48),
    )


def read_workload(path: Path) -> Workload:
    """Reads a workload file (JSON); InputError if it isn't one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Workload)
    except OSError as error:
        raise InputError(f"workload {path}: {error.strerror}: give a JSON file") from error
    except msgspec.DecodeError as error:
        raise InputError(f"workload {path} is not a workload: {error}") from error

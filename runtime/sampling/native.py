"""The native sampler: runtime/kernels/sampling.cpp behind ctypes (which releases the GIL).

`NativeSampler` owns the penalty slots of one worker. It reads the logits where they lie; the rows
of a batch may be shared out over a team of threads, whose answer is bit-equal to one thread's.
"""

import ctypes
import weakref
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from ropeway.compiler.errors import RunError
from ropeway.runtime.sampling.batch import (
    F32,
    STATUS_NO_MEMORY,
    SampleBatch,
    SampleResult,
    SlotReset,
    check_batch,
    empty_result,
    faults_of,
    slot_ids,
)


class SampleArgs(ctypes.Structure):
    """`SampleArgs` of runtime/kernels/sampling.h."""

    _fields_ = [
        ("sampler", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("logits_stride", ctypes.c_int64),
        ("peaks", ctypes.c_void_p),
        ("peak_parts", ctypes.c_int64),
        ("peak_rows", ctypes.c_int64),
        ("peak_only", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("bias_ids", ctypes.c_void_p),
        ("bias_values", ctypes.c_void_p),
        ("banned", ctypes.c_void_p),
        ("masks", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("top_ids", ctypes.c_void_p),
        ("top_logprobs", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
    ]


class RowPeaks(msgspec.Struct, frozen=True):
    """The largest logit of each row, as `Peak` of runtime/kernels/peak.h: `parts` x `rows` of them
    at `address`; a row's is the merger of its parts. Rows that `only` marks have no logits."""

    address: int
    parts: int
    rows: int
    only: npt.NDArray[np.uint8] | None = None


class PreparedSample(msgspec.Struct, frozen=True):
    """Arguments of the native sampler, and the arrays that they point to."""

    args: SampleArgs
    batch: SampleBatch
    result: SampleResult
    status: npt.NDArray[np.int32]

    def finish(self) -> SampleResult:
        """The answer, once the sampler has run."""
        if not self.status.any():
            return self.result
        return self.result.with_faults(faults_of(self.status, self.batch.requests))


def declare(library: ctypes.CDLL) -> None:
    """Gives the sampler's functions of the kernel library their argument types."""
    library.ropeway_sampler_create.argtypes = [ctypes.c_int32, ctypes.c_int32]
    library.ropeway_sampler_create.restype = ctypes.c_void_p
    library.ropeway_sampler_destroy.argtypes = [ctypes.c_void_p]
    library.ropeway_sampler_destroy.restype = None
    library.ropeway_sampler_reset_slot.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int64,
    ]
    library.ropeway_sampler_reset_slot.restype = ctypes.c_int32
    library.ropeway_sample_rows.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
    library.ropeway_sample_rows.restype = None


class NativeSampler:
    """Samples batches of a model with `vocab_size` logits; one call at a time.

    `library` is the loaded kernel library. `isa` forces an instruction set (0 plain, 1 AVX2,
    2 AVX-512; -1 the best here): the answers are the same bits.
    """

    def __init__(self, library: ctypes.CDLL, vocab_size: int, isa: int = -1) -> None:
        declare(library)
        self._library = library
        self._vocab_size = vocab_size
        self._sampler = library.ropeway_sampler_create(vocab_size, isa)
        if not self._sampler:
            raise RunError("out of memory for the sampler: close other programs and load again")
        self._free = weakref.finalize(self, library.ropeway_sampler_destroy, self._sampler)

    def close(self) -> None:
        """Frees the native state; a second call does nothing."""
        self._free()

    def sample(
        self,
        logits: F32,
        batch: SampleBatch,
        run: Callable[[int], None] | None = None,
        peaks: RowPeaks | None = None,
    ) -> SampleResult:
        """Answers every row of the batch; `logits` is f32 [L, V], rows may be strided.

        `run(address)` gets the address of a `SampleArgs` and has each thread of a team call
        `ropeway_sample_rows(address, rank, size)`; None samples on this thread. `peaks`, where the
        device found them with the logits, spare a pass over each row. Raises RunError for a batch
        that doesn't fit the logits; a row that can't be sampled is a fault of the result.
        """
        prepared = self.prepare(logits, batch)
        args = prepared.args
        if peaks:
            if peaks.rows != logits.shape[0]:
                raise RunError(f"peaks of {peaks.rows} rows for {logits.shape[0]} rows of logits")
            args.peaks, args.peak_parts, args.peak_rows = peaks.address, peaks.parts, peaks.rows
            args.peak_only = None if peaks.only is None else peaks.only.ctypes.data
        for reset in batch.resets:
            self._reset(reset)
        if run is None:
            self._library.ropeway_sample_rows(ctypes.addressof(args), 0, 1)
        else:
            run(ctypes.addressof(args))
        return prepared.finish()

    def prepare(self, logits: F32, batch: SampleBatch) -> "PreparedSample":
        """What `ropeway_sample_rows` takes, without peaks. Raises RunError for a batch that doesn't
        fit the logits."""
        check_batch(logits, batch, self._vocab_size)
        result, status = empty_result(batch)
        args = SampleArgs(
            sampler=self._sampler,
            logits=logits.ctypes.data,
            logits_stride=logits.strides[0] // logits.itemsize,
            rows=batch.rows.ctypes.data,
            count=len(batch),
            bias_ids=batch.bias_ids.ctypes.data,
            bias_values=batch.bias_values.ctypes.data,
            banned=batch.banned.ctypes.data,
            masks=batch.masks.ctypes.data,
            tokens=result.tokens.ctypes.data,
            logprobs=result.logprobs.ctypes.data,
            ranks=result.ranks.ctypes.data,
            top_ids=result.top_ids.ctypes.data,
            top_logprobs=result.top_logprobs.ctypes.data,
            status=status.ctypes.data,
        )
        return PreparedSample(args, batch, result, status)

    def _reset(self, reset: SlotReset) -> None:
        prompt, output = self.slot_ids(reset)
        status = self._library.ropeway_sampler_reset_slot(
            self._sampler,
            reset.slot,
            prompt.ctypes.data,
            prompt.size,
            output.ctypes.data,
            output.size,
        )
        if status == STATUS_NO_MEMORY:
            raise RunError("out of memory for penalty counts: lower max_num_seqs")

    def slot_ids(self, reset: SlotReset) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Prompt and output of a refill. Raises RunError for an id outside the vocabulary."""
        return slot_ids(reset.prompt, self._vocab_size), slot_ids(reset.output, self._vocab_size)


def philox(library: ctypes.CDLL, counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """Philox4x32-10 of the native sampler, for tests against its published vectors."""
    out = (ctypes.c_uint32 * 4)()
    library.ropeway_philox((ctypes.c_uint32 * 4)(*counter), (ctypes.c_uint32 * 2)(*key), out)
    return list(out)

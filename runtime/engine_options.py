"""How an engine is to run a program: plain values, checked, cheap to import."""

from typing import Literal

import msgspec

from ropeway.compiler.errors import InputError
from ropeway.runtime.cores import usable_cores

Verify = Literal["fast", "full"]


class EngineOptions(msgspec.Struct, frozen=True):
    """How to run a program; None takes what the program and the machine allow."""

    num_threads: int | None = None
    kv_cache_memory: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_prefill_chunk: int | None = None
    max_model_len: int | None = None  # None: the length that the program was compiled for
    enable_prefix_caching: bool = True
    seed: int = 0
    overlap: bool | None = None
    verify: Verify = "fast"

    def __post_init__(self) -> None:
        sizes = (
            "num_threads",
            "kv_cache_memory",
            "max_num_batched_tokens",
            "max_prefill_chunk",
            "max_model_len",
        )
        for field in ("max_num_seqs", "seed", *sizes):
            value = getattr(self, field)
            if value is None and field in sizes:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputError(f"{field}: {value!r} isn't a whole number")
        if not isinstance(self.enable_prefix_caching, bool):
            raise InputError(
                f"enable_prefix_caching: {self.enable_prefix_caching!r} isn't True or False"
            )
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise InputError(f"overlap: {self.overlap!r} isn't True, False or None")

    @property
    def overlaps(self) -> bool:
        """Whether the host prepares a step while another runs: by default where it has a core
        beside the device's threads."""
        if self.overlap is not None:
            return self.overlap
        return self.num_threads is not None and self.num_threads < usable_cores()

"""From an artifact or a program to an engine that runs it: one way in.

Contract: an artifact is opened and checked, its target's device loads it (and checks itself), then
the KV pool is sized and the engine built. Whatever fails closes what was opened. Nothing of the
compiler's passes, frontends or models is imported.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from ropeway.compiler.artifact.reader import Artifact, ArtifactFiles, open_artifact
from ropeway.compiler.errors import ArtifactError, InputError
from ropeway.compiler.targets.base import Target, activate, device_class
from ropeway.runtime.checksum import fastest_word_sum
from ropeway.runtime.cores import usable_cores
from ropeway.runtime.devices.base import CacheLayout, Device
from ropeway.runtime.devices.cpu.memory import weight_memory
from ropeway.runtime.engine.core import EngineCore
from ropeway.runtime.engine.limits import step_limits
from ropeway.runtime.engine_options import EngineOptions
from ropeway.runtime.structured.compiler import GrammarCompiler
from ropeway.runtime.text.assets import (
    SETTINGS_FILE,
    TOKENIZER_FILE,
    TokenizerAssets,
    read_settings,
)
from ropeway.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tempfile

# The engine's own defaults leave the other 7/8 of the memory to the weights and everybody else.
_CACHE_SHARE = 8
_THREADS_A_CORE = 8  # threads that share a core wait for each other at every barrier
_ASSUMED_MEMORY = 8 << 30  # where the system doesn't say what is available
_TOKENIZER = "tokenizer/"

_KNOWN_ROLES = {"ids", "positions", "rows", "query_start", "lengths"}


class SavedProgram(Protocol):
    """What the loader needs of a compiled program."""

    artifact: Artifact | None

    def save(self, path: str | os.PathLike[str]) -> object:
        """Write the program as an artifact."""
        ...


class Engine(msgspec.Struct):
    """A loaded program, ready to step. `close` releases it."""

    artifact: Artifact
    device: Device
    core: EngineCore
    tokenizer: Tokenizer | None
    num_threads: int
    why: str = ""  # this target and no other
    scratch: "tempfile.TemporaryDirectory[str] | None" = None

    def close(self) -> None:
        """Release the device, then the temporary artifact; a second call does nothing."""
        self.core.halt()
        self.device.close()
        if self.scratch is not None:
            self.scratch.cleanup()


OnOpened = Callable[[TokenizerAssets | None], None]
"""Is told what the tokenizer is made of, while the weights are read."""


class _TextReader:
    """Parses the tokenizer (100 ms for 50,000 tokens) while weights are read, or leaves it to
    whom it tells."""

    def __init__(self, opened: OnOpened | None) -> None:
        self.assets: TokenizerAssets | None = None
        self.tokenizer: Tokenizer | None = None
        self._opened = opened
        self._error: ArtifactError | None = None

    def read(self, files: ArtifactFiles) -> None:
        """Read; what is wrong waits for `check`, so that of several errors the same always wins."""
        self.assets, self.tokenizer, self._error = None, None, None
        try:
            self.assets = tokenizer_assets(files)
            if self._opened is None and self.assets is not None:
                self.tokenizer = Tokenizer.from_assets(self.assets)
        except ArtifactError as error:
            self._error = error
        else:
            if self._opened is not None:
                self._opened(self.assets)

    def check(self) -> None:
        """Raises what was wrong with the last files."""
        if self._error is not None:
            raise self._error

    def when_needed(self) -> Callable[[], Tokenizer] | None:
        """Gives the tokenizer, made then if it wasn't before; None for a program without one."""
        assets, tokenizer = self.assets, self.tokenizer
        if assets is None:
            return None
        return lambda: tokenizer or Tokenizer.from_assets(assets)


def load_engine(
    program: str | os.PathLike[str] | SavedProgram,
    options: EngineOptions,
    opened: OnOpened | None = None,
) -> Engine:
    """Load `program`, an artifact's path or a compiled program, onto its target's device.

    With `opened` the engine itself has no tokenizer: text is the affair of whom it tells.
    Raises ArtifactError for a damaged artifact, TargetError when this machine can't run it,
    InputError for an option that doesn't fit, RunError when the self-check fails.
    """
    reader = _TextReader(opened)
    artifact, scratch = _open(program, options, reader)
    device: Device | None = None
    try:
        activated = activate(artifact.manifest.target, f"the artifact {artifact.path}")
        device = _load_device(artifact, activated.target, options)
        reader.check()
        core = _build_core(artifact, device, reader, options)
    except BaseException:
        if device is not None:
            device.close()
        if scratch is not None:
            scratch.cleanup()
        raise
    return Engine(
        artifact,
        device,
        core,
        reader.tokenizer,
        _threads(options),
        why=activated.why,
        scratch=scratch,
    )


def _open(
    program: str | os.PathLike[str] | SavedProgram,
    options: EngineOptions,
    reader: _TextReader,
) -> tuple[Artifact, "tempfile.TemporaryDirectory[str] | None"]:
    if isinstance(program, str | os.PathLike):
        return _open_checked(program, options, reader), None
    if not hasattr(program, "save"):
        raise InputError(
            f"program: {type(program).__name__} is neither an artifact's path nor what "
            f"ropeway.compile or ropeway.load returned"
        )
    if program.artifact is not None:
        reader.read(program.artifact)
        return program.artifact, None
    # Here: it imports shutil and random, which nobody needs who serves an artifact.
    import tempfile  # noqa: PLC0415

    scratch = tempfile.TemporaryDirectory(prefix="ropeway-")
    path = Path(scratch.name) / "program.rope"
    try:
        program.save(path)
        return _open_checked(path, options, reader), scratch
    except BaseException:
        scratch.cleanup()
        raise


def _open_checked(
    path: str | os.PathLike[str], options: EngineOptions, reader: _TextReader
) -> Artifact:
    return open_artifact(
        path,
        options.verify,
        fastest_word_sum(),
        _threads(options),
        weight_memory,
        meanwhile=reader.read,
    )


def _load_device(artifact: Artifact, target: Target, options: EngineOptions) -> Device:
    for wanted in artifact.function.inputs:
        role = wanted.role.split(".")[0]
        if role not in _KNOWN_ROLES | {"slots", "block_table"}:
            raise ArtifactError(
                f"{artifact.path}: the program wants an input of role {wanted.role!r} "
                f"(%{wanted.name}), which this runtime can't fill: upgrade ropeway"
            )
    device: Device = device_class(target)()
    try:
        device.load(artifact, _threads(options))
    except BaseException:
        device.close()
        raise
    return device


def _threads(options: EngineOptions) -> int:
    cores = usable_cores()
    if options.num_threads is None:
        return cores
    if not 1 <= options.num_threads <= _THREADS_A_CORE * cores:
        raise InputError(
            f"num_threads={options.num_threads}: this process may use {cores} cores; give 1 to "
            f"{_THREADS_A_CORE * cores}"
        )
    return options.num_threads


def tokenizer_assets(artifact: ArtifactFiles) -> TokenizerAssets | None:
    """What an artifact's tokenizer is made of; None when it has none. Raises ArtifactError."""
    if not artifact.names(_TOKENIZER):
        return None
    try:
        settings = read_settings(artifact.read(_TOKENIZER + SETTINGS_FILE))
    except msgspec.MsgspecError as error:
        raise ArtifactError(
            f"{artifact.path}/{_TOKENIZER}{SETTINGS_FILE}: {error}: compile the model again"
        ) from error
    return TokenizerAssets(
        tokenizer_json=artifact.read(_TOKENIZER + TOKENIZER_FILE), settings=settings
    )


def _build_core(
    artifact: Artifact, device: Device, text: _TextReader, options: EngineOptions
) -> EngineCore:
    model = artifact.manifest.model
    max_model_len = _max_model_len(model.max_model_len, options.max_model_len)
    limits = step_limits(
        device.buckets,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_prefill_chunk=options.max_prefill_chunk,
    )
    blocks = kv_blocks(
        device.cache_layout,
        max_tokens=options.max_num_seqs * max_model_len,
        available=device.memory().available,
        wanted=options.kv_cache_memory,
    )
    eos_ids = () if text.assets is None else text.assets.settings.eos_ids
    return EngineCore(
        device,
        limits,
        num_blocks=blocks,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        eos_ids=eos_ids,
        enable_prefix_caching=options.enable_prefix_caching,
        seed=options.seed,
        queue=device.open_queue() if options.overlaps else None,
        grammars=GrammarCompiler(text.when_needed(), model.vocab_size, eos_ids),
    )


def _max_model_len(compiled: int, wanted: int | None) -> int:
    if wanted is None:
        return compiled
    if not 2 <= wanted <= compiled:
        raise InputError(
            f"max_model_len={wanted}: the program was compiled for {compiled} tokens: give 2 to "
            f"{compiled}, or compile it with a larger max_model_len"
        )
    return wanted


def kv_blocks(layout: CacheLayout, *, max_tokens: int, available: int, wanted: int | None) -> int:
    """How many KV blocks to allocate, the null block included.

    `wanted` bytes, else what `max_tokens` tokens take, but at most 1/8 of the `available` bytes
    (0: unknown). Raises InputError when not even one block beside the null block fits, or more is
    wanted than there is.
    """
    if wanted is not None and wanted > available > 0:
        raise InputError(
            f"kv_cache_memory: {wanted} bytes are more than the {available} that are available: "
            f"give less, or None for what the program needs"
        )
    if wanted is None:
        wanted = min(
            (-(-max_tokens // layout.block_size) + 1) * layout.block_bytes,
            (available or _ASSUMED_MEMORY) // _CACHE_SHARE,
        )
    blocks = wanted // layout.block_bytes
    if blocks < 2:
        raise InputError(
            f"kv_cache_memory: {wanted} bytes hold {blocks} KV blocks of {layout.block_bytes} "
            f"bytes, but two are the least (one stays empty): give at least "
            f"{2 * layout.block_bytes} bytes"
        )
    return blocks

"""The compile-time half of a target, and how targets are found.

Targets come from the entry point group `ropeway.targets`, so a vendor ships one in its own package.
An entry point names a class without arguments that follows `Target`. Nothing here imports torch or
sympy: the runtime asks here which device class serves an artifact.
"""

import functools
import importlib
import importlib.metadata
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import TargetError

if TYPE_CHECKING:
    from ropeway.compiler.ir.graph import Module

GROUP = "ropeway.targets"
_log = logging.getLogger("ropeway.targets")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a target takes: checked by legalize, before anything is lowered."""

    dtypes: frozenset[str]  # of activations: f32, bf16
    ops: frozenset[str]  # IR ops that lowering knows, fused ones included
    block_size: int  # tokens in a KV block
    weight_layout: str  # of matrices: panel32, or rows for none of its own


@dataclass(frozen=True, slots=True)
class CacheGroupPlan:
    """The physical size of a cache group's blocks, over all its layers."""

    group: int
    layers: int
    block_size: int
    bytes_per_block: int


@dataclass(frozen=True, slots=True)
class BucketMemory:
    """Bytes that a bucket's step needs beside weights and caches."""

    bucket: Bucket
    arena_bytes: int
    buffers: int
    without_reuse_bytes: int


@dataclass(frozen=True, slots=True)
class Payload:
    """What lowering gives the artifact: one file per bucket, and files that buckets share."""

    graphs: dict[Bucket, tuple[str, bytes]]  # bucket -> (artifact-relative file, content)
    files: dict[str, bytes] = field(default_factory=dict)
    cache_groups: tuple[CacheGroupPlan, ...] = ()
    memory: tuple[BucketMemory, ...] = ()


class Target(Protocol):
    """The compile-time half. `device` is "module:class" of the run-time half."""

    name: str
    device: str

    def capabilities(self) -> Capabilities:
        """What the target takes."""
        ...

    def lower(self, module: "Module", buckets: Sequence[Bucket]) -> Payload:
        """Turn a legalized module into payloads. Raises TargetError naming op and source line."""
        ...


@dataclass(frozen=True, slots=True)
class Activated:
    """A target with the reason why it was taken, as the log says it."""

    target: Target
    why: str


def available_targets() -> dict[str, str]:
    """Every installed target: name -> "module:class (package version)", by name."""
    return {name: f"{entry.value} ({_origin(entry)})" for name, entry in sorted(_entries().items())}


@functools.cache
def _entries() -> dict[str, importlib.metadata.EntryPoint]:
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        known = found.get(entry.name)
        if known is not None and known.value != entry.value:
            raise TargetError(
                f"target {entry.name!r} is provided twice, by {known.value} ({_origin(known)}) and "
                f"{entry.value} ({_origin(entry)}): uninstall one of them"
            )
        found[entry.name] = entry
    return found


def _origin(entry: importlib.metadata.EntryPoint) -> str:
    distribution = entry.dist
    return f"{distribution.name} {distribution.version}" if distribution else "unknown package"


def activate(name: str, asked_by: str = "the caller") -> Activated:
    """Load one target by name and log which was activated and why.

    Raises TargetError when no installed package provides it, or when its package doesn't import.
    """
    entries = _entries()
    entry = entries.get(name)
    if entry is None:
        raise TargetError(
            f"no target {name!r}: installed are {', '.join(sorted(entries)) or 'none'}; install "
            f"the package that provides it (entry point group {GROUP!r})"
        )
    try:
        target: Target = entry.load()()
    except ImportError as error:
        raise TargetError(
            f"target {name!r} from {entry.value} ({_origin(entry)}) doesn't import: {error}"
        ) from error
    why = f"{asked_by} asked for {name!r}; {entry.value} from {_origin(entry)} provides it"
    _log.info("target %s activated: %s", name, why)
    return Activated(target, why)


def device_class(target: Target) -> type[Any]:
    """The run-time half of a target, imported only now."""
    module, _, attribute = target.device.partition(":")
    try:
        found: type[Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise TargetError(
            f"target {target.name!r} names device {target.device!r}, which doesn't import: {error}"
        ) from error
    return found

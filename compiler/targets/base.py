"""The compile-time half of a target, and how targets are found.

Targets come from the entry point group `ropeway.targets`, so a vendor ships one in its own package.
An entry point names a class without arguments that follows `Target`. Nothing here imports torch or
sympy: the runtime asks here which device class serves an artifact.
"""

import functools
import importlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import TargetError
from ropeway.compiler.version import VERSION

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from ropeway.compiler.ir.graph import Module

GROUP = "ropeway.targets"
# Found without a look at what else is installed, which takes 20 to 30 ms; pyproject.toml lists them
# as entry points too.
OWN = {
    "cpu": "ropeway.compiler.targets.cpu.target:CpuTarget",
    "reference": "ropeway.compiler.targets.reference.target:ReferenceTarget",
}
_log = logging.getLogger("ropeway.targets")


class Capabilities(msgspec.Struct, frozen=True):
    """What a target takes: checked by legalize, before anything is lowered."""

    dtypes: frozenset[str]  # of activations: f32, bf16
    ops: frozenset[str]  # IR ops that lowering knows, fused ones included
    block_size: int  # tokens in a KV block
    weight_layout: str  # of matrices: panel32, or rows for none of its own


class CacheGroupPlan(msgspec.Struct, frozen=True):
    """The physical size of a cache group's blocks, over all its layers."""

    group: int
    layers: int
    block_size: int
    bytes_per_block: int


class BucketMemory(msgspec.Struct, frozen=True):
    """Bytes that a bucket's step needs beside weights and caches."""

    bucket: Bucket
    arena_bytes: int
    buffers: int
    without_reuse_bytes: int


class Payload(msgspec.Struct, frozen=True):
    """What lowering gives the artifact: one file per bucket, and files that buckets share."""

    graphs: dict[Bucket, tuple[str, bytes]]  # bucket -> (artifact-relative file, content)
    files: dict[str, bytes] = msgspec.field(default_factory=dict)
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


class Activated(msgspec.Struct, frozen=True):
    """A target with the reason why it was taken, as the log says it."""

    target: Target
    why: str


def available_targets() -> dict[str, str]:
    """Every installed target: name -> "module:class (package version)", by name."""
    return {name: f"{entry.value} ({_origin(entry)})" for name, entry in sorted(_entries().items())}


@functools.cache
def _entries() -> "dict[str, EntryPoint]":
    # Here: it imports the email package, which nobody needs who serves one of our own targets.
    import importlib.metadata  # noqa: PLC0415

    found: dict[str, EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        known = found.get(entry.name)
        if known is not None and known.value != entry.value:
            raise TargetError(
                f"target {entry.name!r} is provided twice, by {known.value} ({_origin(known)}) and "
                f"{entry.value} ({_origin(entry)}): uninstall one of them"
            )
        found[entry.name] = entry
    return found


def _origin(entry: "EntryPoint") -> str:
    distribution = entry.dist
    return f"{distribution.name} {distribution.version}" if distribution else "unknown package"


def activate(name: str, asked_by: str = "the caller") -> Activated:
    """Load one target by name and log which was activated and why.

    Our own are taken whatever else is installed. Raises TargetError when no installed package
    provides it, or when its package doesn't import.
    """
    value, origin = OWN.get(name), f"ropeway {VERSION}"
    entry = _installed(name) if value is None else None
    if entry is not None:
        value, origin = entry.value, _origin(entry)
    try:
        target: Target = (entry.load() if entry else _imported(OWN[name]))()
    except ImportError as error:
        raise TargetError(
            f"target {name!r} from {value} ({origin}) doesn't import: {error}"
        ) from error
    why = f"{asked_by} asked for {name!r}; {value} from {origin} provides it"
    _log.info("target %s activated: %s", name, why)
    return Activated(target, why)


def _installed(name: str) -> "EntryPoint":
    entries = _entries()
    if name not in entries:
        raise TargetError(
            f"no target {name!r}: installed are {', '.join(sorted(entries)) or 'none'}; install "
            f"the package that provides it (entry point group {GROUP!r})"
        )
    return entries[name]


def _imported(value: str) -> type[Any]:
    """The class that "module:class" names."""
    module, _, attribute = value.partition(":")
    found: type[Any] = getattr(importlib.import_module(module), attribute)
    return found


def device_class(target: Target) -> type[Any]:
    """The run-time half of a target, imported only now."""
    try:
        return _imported(target.device)
    except (ImportError, AttributeError) as error:
        raise TargetError(
            f"target {target.name!r} names device {target.device!r}, which doesn't import: {error}"
        ) from error

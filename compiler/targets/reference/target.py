"""Target reference: the IR itself, interpreted with torch. The oracle, and it runs everywhere."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import msgspec

from ropeway.compiler.config import Bucket
from ropeway.compiler.targets.base import BucketMemory, CacheGroupPlan, Capabilities, Payload

if TYPE_CHECKING:
    from ropeway.compiler.ir.graph import Module
    from ropeway.compiler.ir.types import CacheType

BLOCK_SIZE = 16


class ReferenceTarget:
    """Takes every op of the registry, in f32 and bf16."""

    name = "reference"
    device = "ropeway.runtime.devices.reference.device:ReferenceDevice"

    def capabilities(self) -> Capabilities:
        """Every registered op, weights as they are, KV blocks of 16 tokens."""
        # The registry needs the IR and thereby sympy, which a server doesn't load.
        from ropeway.compiler.ops.registry import names  # noqa: PLC0415

        return Capabilities(
            dtypes=frozenset(("bf16", "f32")),
            ops=frozenset(names()),
            block_size=BLOCK_SIZE,
            weight_layout="rows",
        )

    def lower(self, module: "Module", buckets: Sequence[Bucket]) -> Payload:
        """Only the buckets' sizes: the device interprets the artifact's IR."""
        return Payload(
            graphs={
                bucket: (f"graphs/{bucket.name}.json", msgspec.json.encode(bucket))
                for bucket in buckets
            },
            cache_groups=_cache_groups(module),
            memory=tuple(BucketMemory(bucket, 0, 0, 0) for bucket in buckets),
        )


def _cache_groups(module: "Module") -> tuple[CacheGroupPlan, ...]:
    """Unpadded planes of 16 tokens."""
    from ropeway.compiler.ir.types import CacheType  # noqa: PLC0415

    layers: dict[int, list[int]] = {}
    for entry in module.fn.inputs:
        if isinstance(entry.value.type, CacheType):
            layers.setdefault(entry.value.type.group, []).append(_token_bytes(entry.value.type))
    return tuple(
        CacheGroupPlan(group, len(sizes), BLOCK_SIZE, BLOCK_SIZE * sum(sizes))
        for group, sizes in sorted(layers.items())
    )


def _token_bytes(kind: "CacheType") -> int:
    return sum(plane.dtype.itemsize * prod(plane.shape) for plane in kind.planes)

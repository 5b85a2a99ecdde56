"""Target cpu: a plan of native kernel calls per bucket."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropeway.compiler.config import Bucket
from ropeway.compiler.targets.base import Capabilities, Payload
from ropeway.compiler.targets.cpu.kernel_table import BLOCK_TOKENS

if TYPE_CHECKING:
    from ropeway.compiler.ir.graph import Module


class CpuTarget:
    """Compiles anywhere; runs where the native kernels were built."""

    name = "cpu"
    device = "ropeway.runtime.devices.cpu.device:CpuDevice"

    def capabilities(self) -> Capabilities:
        """bf16 and f32, KV blocks of 32 tokens, packed matrices."""
        # The lowerings need the IR and thereby sympy, which a server doesn't load.
        from ropeway.compiler.targets.cpu.op_lowering import LOWERINGS  # noqa: PLC0415

        return Capabilities(
            dtypes=frozenset(("bf16", "f32")),
            ops=frozenset(LOWERINGS),
            block_size=BLOCK_TOKENS,
            weight_layout="panel32",
        )

    def lower(self, module: "Module", buckets: Sequence[Bucket]) -> Payload:
        """One template file and one small file per bucket."""
        from ropeway.compiler.targets.cpu.lower import lower  # noqa: PLC0415

        return lower(module, buckets)

"""The kernels that a plan may call: operands, parameters and their numbers in the native library.

`runtime/kernels/executor.cpp` holds the same table; `signatures` is compared with the library's own
on load, so a library that was built from other sources is refused instead of misread.
"""

import msgspec

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
UNARY_OPS = (
    "copy",
    "neg",
    "exp",
    "rsqrt",
    "sqrt",
    "cos",
    "sin",
    "abs",
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "tanh",
    "sigmoid",
)
BINARY_OPS = ("add", "sub", "mul", "div", "pow", "max", "min")
REDUCE_OPS = ("sum", "mean")

MAX_DIMS = 6  # of a strided operand, the row included
MAX_HEAD_DIM = 256
BLOCK_TOKENS = 32


class Kernel(msgspec.Struct, frozen=True):
    """One kernel: operand names in native order ("?" at the end: optional), then parameters.

    `choices` maps a parameter to the values it may take; the native side gets their number.
    """

    name: str
    operands: tuple[str, ...]
    ints: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    choices: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def operand_names(self) -> tuple[str, ...]:
        """Operand names without the optional mark."""
        return tuple(name.rstrip("?") for name in self.operands)

    @property
    def required(self) -> frozenset[str]:
        """Operands that must be there."""
        return frozenset(name for name in self.operands if not name.endswith("?"))

    @property
    def params(self) -> frozenset[str]:
        """All parameter names."""
        return frozenset((*self.ints, *self.floats, *(name for name, _ in self.choices)))

    @property
    def signature(self) -> str:
        """One line that the native table must repeat."""
        numbers = (*self.ints, *(name for name, _ in self.choices))
        return f"{self.name}({','.join(self.operands)};{','.join(numbers)};{','.join(self.floats)})"


_NORM = ("eps", "offset")

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("embedding", ("ids", "table", "y")),
        Kernel("rms_norm", ("x", "residual?", "gain?", "sum?", "y"), floats=_NORM),
        Kernel("layer_norm", ("x", "gain?", "bias?", "y"), floats=("eps",)),
        Kernel(
            "gemm",
            ("x", "weight", "bias?", "add?", "residual?", "gain?", "sum?", "y"),
            ints=("norm",),
            floats=_NORM,
        ),
        Kernel("glu", ("x", "y"), choices=(("act", ACTIVATIONS),)),
        Kernel(
            "rope",
            ("q", "k?", "positions", "table", "q_out", "k_out?"),
            ints=("rotary_dim", "interleaved"),
        ),
        Kernel("kv_write", ("k", "v", "cache", "slots")),
        Kernel(
            "attention",
            ("q", "cache", "block_table", "query_start", "lengths", "y"),
            ints=("window",),
            floats=("scale", "softcap"),
        ),
        Kernel("gather_rows", ("x", "index", "y")),
        Kernel("unary", ("x", "y"), choices=(("op", UNARY_OPS),)),
        Kernel("binary", ("a", "b?", "y"), floats=("scalar",), choices=(("op", BINARY_OPS),)),
        Kernel("reduce", ("x", "y"), ints=("reduced",), choices=(("op", REDUCE_OPS),)),
        Kernel("softmax", ("x", "y")),
        Kernel(
            "gemm_glu",
            ("x", "weight", "bias?", "residual?", "gain?", "sum?", "y"),
            ints=("norm",),
            floats=_NORM,
            choices=(("act", ACTIVATIONS),),
        ),
    )
}

NUMBERS: dict[str, int] = {name: number for number, name in enumerate(KERNELS)}


def signatures() -> str:
    """The whole table as the native library states it."""
    return "\n".join(kernel.signature for kernel in KERNELS.values())

"""Types of values: tensors with symbolic shapes, and the KV cache, the only mutable type."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from ropeway.compiler.ir.dims import Dim, canonical, print_dim, substitute


class DType(enum.StrEnum):
    """Element types; the value is the name in IR text."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    I32 = "i32"
    I64 = "i64"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEM_SIZES[self.value]

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point type."""
        return self in (DType.F32, DType.BF16, DType.F16)


_ITEM_SIZES = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4, "i64": 8, "bool": 1}


@dataclass(frozen=True)
class TensorType:
    """A dense tensor, e.g. `bf16[T, 576]`; the shape is the logical, unpacked one."""

    dtype: DType
    shape: tuple[Dim, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType(self.dtype))
        object.__setattr__(self, "shape", tuple(canonical(dim) for dim in self.shape))

    def __str__(self) -> str:
        return f"{self.dtype.value}[{', '.join(print_dim(dim) for dim in self.shape)}]"

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def substitute(self, sizes: Mapping[str, Dim]) -> "TensorType":
        """The type with the named symbols replaced."""
        return TensorType(self.dtype, tuple(substitute(dim, sizes) for dim in self.shape))


@dataclass(frozen=True)
class Plane:
    """One named tensor of a cache: what it holds per token, e.g. k: bf16[3, 64]."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType(self.dtype))
        object.__setattr__(self, "shape", tuple(self.shape))

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype.value}[{', '.join(str(n) for n in self.shape)}]"


@dataclass(frozen=True)
class CacheType:
    """The KV cache of one layer; layers of one group share slots and block tables."""

    group: int
    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "planes", tuple(self.planes))

    def __str__(self) -> str:
        planes = ", ".join(str(plane) for plane in self.planes)
        return f"cache<group {self.group}, planes {{{planes}}}>"

    def plane(self, name: str) -> Plane | None:
        """The plane of this name, if there is one."""
        return next((plane for plane in self.planes if plane.name == name), None)

    def substitute(self, sizes: Mapping[str, Dim]) -> "CacheType":
        """Planes have fixed sizes: the type itself."""
        return self


Type = TensorType | CacheType

"""The CPU plan: data only, written by lowering, checked on load, run by one native call a step.

Buckets of one program differ in nothing but sizes, so a program is stored as one `Template` (the
kernel calls, whose operands are views into numbered buffers) and per bucket a `BucketPlan` (where
each buffer lies in the arena). A buffer is a matrix of rows: its row count is the step's true count
of tokens, requests or wanted rows, known only when the step runs; a bucket bounds it.

Nothing here is trusted: `plan_checks.check_template` and `check_bucket` run before any native code
sees the numbers. This module imports neither torch nor sympy: a server loads it.
"""

import math
from typing import Literal

import msgspec

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import ArtifactError

TEMPLATE_FILE = "graphs/template.json"
PLAN_VERSION = 1
ALIGNMENT = 64  # bytes: a cache line and an AVX-512 register; rows and buffers start on it

RowKind = Literal["tokens", "requests", "rows"]
Space = Literal["arena", "weights", "input", "cache"]
Layout = Literal["rows", "panel32", "panel32_gated"]
ElementType = Literal["f32", "bf16", "i32"]

ITEM_SIZES: dict[str, int] = {"f32": 4, "bf16": 2, "i32": 4}


class Buffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A matrix in the arena; `rows` says which true count is its height."""

    rows: RowKind
    row_bytes: int


class WeightSlot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A weight of the program, by its name in the weight file.

    `shape` is logical: [N, K] for a matrix y = x W^T. Layout `panel32` stores it as
    [ceil(N/32)][Kp/2][32][2] (bf16) or [ceil(N/32)][Kp][32] (f32), Kp = K rounded up to 32.
    `panel32_gated` has 16 rows of the first half and then 16 of the second in each panel.
    """

    name: str
    dtype: ElementType
    shape: tuple[int, ...]
    layout: Layout

    @property
    def stored_bytes(self) -> int:
        """Bytes in the weight file, padding of the layout included."""
        items = 1
        for size in self.stored_shape:
            items *= size
        return items * ITEM_SIZES[self.dtype]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the weight file."""
        if self.layout == "rows":
            return self.shape
        outputs, depth = self.shape
        panels, padded = -(-outputs // 32), -(-depth // 32) * 32
        if self.dtype == "bf16":
            return (panels, padded // 2, 32, 2)
        return (panels, padded, 32)


class CacheSlot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One layer's KV cache; the layers of a group share slots and block table."""

    name: str
    group: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: ElementType


class Ref(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An operand: in each row, a strided view of `shape` elements from byte `offset` on.

    `index` numbers the buffer, weight, input or cache of the space. `strides` count elements, one
    per entry of `shape`; the stride between rows is the row_bytes of the buffer, and 0 for a
    weight. For inputs, caches and packed weights only space and index count.
    """

    space: Space
    index: int
    dtype: ElementType
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0

    @property
    def width(self) -> int:
        """Elements in a row of the view."""
        return math.prod(self.shape)

    @property
    def adjacent(self) -> bool:
        """Whether the elements of a row lie next to each other, in order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


class Step(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One kernel call. `op` names the IR op and its source line, for errors and profiles."""

    kernel: str
    op: str
    rows: RowKind
    operands: dict[str, Ref]
    params: dict[str, int | float | str] = {}


class Template(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all buckets of a program share."""

    version: int
    block_size: int
    inputs: list[str]  # roles: ids, positions, rows, query_start, lengths, slots.0, block_table.0
    weights: list[WeightSlot]
    caches: list[CacheSlot]
    buffers: list[Buffer]
    steps: list[Step]
    logits: Ref
    max_length: int  # tokens of the longest request that the program can serve


class BucketPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a bucket keeps each buffer of the template: byte offsets into one arena."""

    bucket: Bucket
    arena_bytes: int
    offsets: list[int]


def bucket_file(bucket: Bucket) -> str:
    """The artifact-relative file of a bucket's plan."""
    return f"graphs/{bucket.name}.json"


def row_capacity(bucket: Bucket, rows: RowKind) -> int:
    """The most rows of a kind that a bucket's step can have."""
    return {"tokens": bucket.tokens, "requests": bucket.requests, "rows": bucket.rows}[rows]


def encode(plan: Template | BucketPlan) -> bytes:
    """The file's bytes."""
    return msgspec.json.encode(plan)


def decode_template(data: bytes, where: str = TEMPLATE_FILE) -> Template:
    """Parse, not check: see plan_checks. Raises ArtifactError for data of another shape."""
    try:
        template = msgspec.json.decode(data, type=Template)
    except msgspec.MsgspecError as error:
        raise ArtifactError(
            f"{where}: not a CPU plan template ({error}): compile the model again"
        ) from None
    if template.version != PLAN_VERSION:
        raise ArtifactError(
            f"{where}: plan version {template.version}, this ropeway reads {PLAN_VERSION}: "
            f"compile the model again"
        )
    return template


def decode_bucket(data: bytes, where: str) -> BucketPlan:
    """Parse, not check: see plan_checks. Raises ArtifactError for data of another shape."""
    try:
        return msgspec.json.decode(data, type=BucketPlan)
    except msgspec.MsgspecError as error:
        raise ArtifactError(
            f"{where}: not a CPU bucket plan ({error}): compile the model again"
        ) from None

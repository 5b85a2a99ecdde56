"""Bounds checks of a CPU plan: every number is proved harmless before native code sees it.

Contract: after `check_template` and `check_bucket` returned, running the plan with step inputs that
the device accepted touches no byte outside the arena, the weights, the caches and the inputs.
Anything else raises ArtifactError naming file, step, op and what is wrong. What a plan computes is
not judged here: the self-check and the artifact's checksums do that.
"""

import math
from collections.abc import Callable

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import ArtifactError
from ropeway.compiler.targets.cpu.kernel_table import (
    BLOCK_TOKENS,
    KERNELS,
    MAX_DIMS,
    MAX_HEAD_DIM,
)
from ropeway.compiler.targets.cpu.plan import (
    ALIGNMENT,
    ITEM_SIZES,
    TEMPLATE_FILE,
    BucketPlan,
    CacheSlot,
    Ref,
    Step,
    Template,
    WeightSlot,
    row_capacity,
)

MAX_SIZE = 1 << 31  # of any dimension, and of a bucket's counts: products of two stay in int64
MAX_BYTES = 1 << 44
_FIXED_INPUTS = ("ids", "positions", "rows", "query_start", "lengths")


class _Refusal(Exception):  # noqa: N818 - caught and turned into an ArtifactError right here
    """Why a step is refused."""


def check_template(template: Template, where: str = TEMPLATE_FILE) -> None:
    """Refuse a template whose steps could leave their operands; see the module's contract."""
    try:
        if not template.steps:
            raise _Refusal("it has no steps")
        _check_tables(template)
    except _Refusal as refusal:
        raise ArtifactError(f"{where}: {refusal}: compile the model again") from None
    for number, step in enumerate(template.steps):
        try:
            _StepCheck(template, step).run()
        except _Refusal as refusal:
            raise ArtifactError(
                f"{where}: step {number} ({step.kernel}, {step.op}): {refusal}: "
                f"compile the model again"
            ) from None


def check_bucket(template: Template, plan: BucketPlan, bucket: Bucket, where: str) -> None:
    """Refuse a bucket whose buffers leave the arena or aren't aligned."""
    problem = _bucket_problem(template, plan, bucket)
    if problem:
        raise ArtifactError(f"{where}: {problem}: compile the model again")


def _bucket_problem(template: Template, plan: BucketPlan, bucket: Bucket) -> str | None:
    if plan.bucket != bucket:
        return f"holds bucket {plan.bucket.name}, not {bucket.name}"
    if not all(0 < n < MAX_SIZE for n in (bucket.tokens, bucket.requests, bucket.rows)):
        return f"bucket {bucket} has an impossible size"
    if len(plan.offsets) != len(template.buffers):
        return f"{len(plan.offsets)} offsets for {len(template.buffers)} buffers"
    if not 0 <= plan.arena_bytes <= MAX_BYTES:
        return f"an arena of {plan.arena_bytes} bytes"
    for number, (offset, buffer) in enumerate(zip(plan.offsets, template.buffers, strict=True)):
        end = offset + row_capacity(bucket, buffer.rows) * buffer.row_bytes
        if offset < 0 or offset % ALIGNMENT or end > plan.arena_bytes:
            return f"buffer {number} at {offset}..{end} in an arena of {plan.arena_bytes} bytes"
    return None


def _check_tables(template: Template) -> None:
    """Everything but the steps."""
    if template.block_size != BLOCK_TOKENS:
        raise _Refusal(f"block size {template.block_size}, the kernels have {BLOCK_TOKENS}")
    if not 0 < template.max_length < MAX_SIZE:
        raise _Refusal(f"max_length {template.max_length}")
    for number, buffer in enumerate(template.buffers):
        if not 0 < buffer.row_bytes < MAX_SIZE or buffer.row_bytes % ALIGNMENT:
            raise _Refusal(f"buffer {number} has rows of {buffer.row_bytes} bytes")
    for slot in template.weights:
        _check_weight(slot)
    for cache in template.caches:
        _check_cache(template, cache)
    _check_inputs(template)
    logits = template.logits
    view = _arena_view(template, logits)
    rows = template.buffers[logits.index].rows
    if logits.dtype != "f32" or rows != "rows" or len(view.shape) != 1 or not view.adjacent:
        raise _Refusal("logits aren't an f32 matrix with one row per wanted row")


def _check_weight(slot: WeightSlot) -> None:
    if not slot.shape or any(not 0 < n < MAX_SIZE for n in slot.shape):
        raise _Refusal(f"weight {slot.name!r} has shape {slot.shape}")
    if slot.layout != "rows" and (len(slot.shape) != 2 or slot.dtype == "i32"):
        raise _Refusal(f"weight {slot.name!r} can't have layout {slot.layout}")
    if slot.layout == "panel32_gated" and slot.shape[0] % 32:
        raise _Refusal(f"weight {slot.name!r} has {slot.shape[0]} rows, gated ones come in 32s")
    if slot.stored_bytes > MAX_BYTES:
        raise _Refusal(f"weight {slot.name!r} has {slot.stored_bytes} bytes")


def _check_cache(template: Template, cache: CacheSlot) -> None:
    sizes = (cache.key_dim, cache.value_dim)
    if any(not 0 < n <= MAX_HEAD_DIM for n in sizes) or not 0 < cache.heads <= 1 << 16:
        raise _Refusal(f"cache {cache.name!r} has {cache.heads} heads of {sizes}")
    if cache.dtype not in ("f32", "bf16"):
        raise _Refusal(f"cache {cache.name!r} has dtype {cache.dtype}")
    if not 0 <= cache.group < len(template.caches):
        raise _Refusal(f"cache {cache.name!r} is in group {cache.group}")


def _check_inputs(template: Template) -> None:
    groups = {cache.group for cache in template.caches}
    known = {*_FIXED_INPUTS, *(f"{role}.{g}" for role in ("slots", "block_table") for g in groups)}
    if len(set(template.inputs)) != len(template.inputs) or not set(template.inputs) <= known:
        raise _Refusal(f"inputs {template.inputs}, known are {sorted(known)}")


def _arena_view(template: Template, ref: Ref) -> Ref:
    """The ref itself once it is proved to stay inside a row of its buffer."""
    if ref.space != "arena" or not 0 <= ref.index < len(template.buffers):
        raise _Refusal(f"no buffer {ref.space} {ref.index}")
    _check_span(ref, template.buffers[ref.index].row_bytes)
    return ref


def _check_span(ref: Ref, limit: int) -> None:
    """The view's last byte lies below `limit`, and nothing before its first."""
    item = ITEM_SIZES[ref.dtype]
    if len(ref.shape) != len(ref.strides) or len(ref.shape) >= MAX_DIMS:
        raise _Refusal(f"a view of shape {ref.shape} with strides {ref.strides}")
    if any(not 0 < n < MAX_SIZE for n in ref.shape) or any(s < 0 for s in ref.strides):
        raise _Refusal(f"a view of shape {ref.shape} with strides {ref.strides}")
    last = sum((n - 1) * s for n, s in zip(ref.shape, ref.strides, strict=True))
    end = ref.offset + (last + 1) * item
    if ref.offset < 0 or ref.offset % item or end > limit:
        raise _Refusal(f"a view of bytes {ref.offset}..{end} in a row of {limit} bytes")


class _StepCheck:
    """Checks one step; each kernel has a method of its name."""

    def __init__(self, template: Template, step: Step) -> None:
        self.template = template
        self.step = step
        self.operands = step.operands

    def run(self) -> None:
        kernel = KERNELS.get(self.step.kernel)
        if kernel is None:
            raise _Refusal(f"no kernel {self.step.kernel!r}")
        names = set(self.operands)
        if not kernel.required <= names or not names <= set(kernel.operand_names):
            raise _Refusal(f"operands {sorted(names)}, the kernel has {kernel.operands}")
        if set(self.step.params) != kernel.params:
            raise _Refusal(f"parameters {sorted(self.step.params)}, not {sorted(kernel.params)}")
        for name, ref in self.operands.items():
            if len(ref.shape) != len(ref.strides) or len(ref.shape) > MAX_DIMS:
                raise _Refusal(f"{name} has {len(ref.shape)} sizes and {len(ref.strides)} strides")
        for name in kernel.ints:
            self._integer(name)
        for name in kernel.floats:
            value = self.step.params[name]
            if isinstance(value, str) or not math.isfinite(value):
                raise _Refusal(f"parameter {name} is {value!r}")
        for name, choices in kernel.choices:
            if self.step.params[name] not in choices:
                raise _Refusal(f"parameter {name} is {self.step.params[name]!r}, not {choices}")
        check: Callable[[], None] = getattr(self, kernel.name)
        check()

    # --- the kernels ---

    def embedding(self) -> None:
        y = self._matrix("y")
        if self._input("ids", ("ids", "positions")) and self.step.rows != "tokens":
            raise _Refusal("ids are per token")
        table = self._weight("table")
        if table.layout == "panel32_gated":
            raise _Refusal(f"table {table.name!r} holds gates beside ups")
        if len(table.shape) != 2 or table.shape[1] != y.width or table.dtype != y.dtype:
            raise _Refusal(f"table {table.dtype}{table.shape} for rows of {y.dtype}[{y.width}]")

    def rms_norm(self) -> None:
        x, y = self._matrix("x", heads=True), self._matrix("y", heads=True)
        self._same_shape(x, y)
        self._residual(x)
        self._vector("gain", x.shape[-1], x.dtype)

    def layer_norm(self) -> None:
        x, y = self._matrix("x", heads=True), self._matrix("y", heads=True)
        self._same_shape(x, y)
        self._vector("gain", x.shape[-1], x.dtype)
        self._vector("bias", x.shape[-1], x.dtype)

    def gemm(self) -> None:
        x, y = self._matrix("x"), self._matrix("y")
        self._product(x, y.width, "panel32")
        if y.dtype not in (x.dtype, "f32"):
            raise _Refusal(f"{x.dtype} -> {y.dtype}")
        if "add" in self.operands:
            self._same_shape(self._matrix("add"), y)

    def gemm_glu(self) -> None:
        x, y = self._matrix("x"), self._matrix("y")
        self._product(x, 2 * y.width, "panel32_gated")
        if y.dtype != x.dtype:
            raise _Refusal(f"{x.dtype} -> {y.dtype}")

    def _product(self, x: Ref, outputs: int, layout: str) -> None:
        """The weight, bias and norm of x [.., K] -> [.., outputs]."""
        weight = self._weight("weight")
        if weight.layout != layout or weight.shape != (outputs, x.width):
            raise _Refusal(
                f"weight {weight.layout}{weight.shape} for {x.width} inputs and {outputs} outputs"
            )
        if weight.dtype != x.dtype:
            raise _Refusal(f"{x.dtype} x {weight.dtype}")
        self._vector("bias", outputs, x.dtype)
        normed = self._integer("norm")
        if normed not in (0, 1) or (not normed and {"residual", "gain", "sum"} & {*self.operands}):
            raise _Refusal(f"norm is {normed} with operands {sorted(self.operands)}")
        self._residual(x)
        self._vector("gain", x.width, x.dtype)

    def glu(self) -> None:
        x, y = self._matrix("x"), self._matrix("y")
        if x.width != 2 * y.width or x.dtype != y.dtype:
            raise _Refusal(f"{x.dtype}[{x.width}] -> {y.dtype}[{y.width}]")

    def rope(self) -> None:
        self._input("positions", ("positions",))
        if self.step.rows != "tokens":
            raise _Refusal("positions are per token")
        table, rotary = self._weight("table"), self._integer("rotary_dim")
        if table.layout != "rows" or table.dtype != "f32" or len(table.shape) != 2:
            raise _Refusal(f"table {table.layout} {table.dtype}{table.shape}")
        q, q_out = self._heads("q"), self._heads("q_out")
        self._same_shape(q, q_out)
        if rotary <= 0 or rotary % 2 or rotary > q.shape[1] or rotary > table.shape[1]:
            raise _Refusal(f"rotary_dim {rotary}, head_dim {q.shape[1]}, table {table.shape}")
        if self._integer("interleaved") not in (0, 1):
            raise _Refusal("interleaved is neither 0 nor 1")
        if ("k" in self.operands) != ("k_out" in self.operands):
            raise _Refusal("k and k_out go together")
        if "k" in self.operands:
            k, k_out = self._heads("k"), self._heads("k_out")
            self._same_shape(k, k_out)
            if k.shape[1] != q.shape[1] or k.dtype != q.dtype:
                raise _Refusal(f"q {q.dtype}{q.shape} and k {k.dtype}{k.shape}")

    def kv_write(self) -> None:
        cache = self._cache()
        self._input("slots", (f"slots.{cache.group}",))
        k, v = self._heads("k"), self._heads("v")
        if k.shape != (cache.heads, cache.key_dim) or v.shape != (cache.heads, cache.value_dim):
            raise _Refusal(f"k {k.shape} and v {v.shape} for cache {cache}")
        if {k.dtype, v.dtype} != {cache.dtype} or self.step.rows != "tokens":
            raise _Refusal(f"k {k.dtype}, v {v.dtype}, cache {cache.dtype}, per {self.step.rows}")

    def attention(self) -> None:
        cache = self._cache()
        self._input("block_table", (f"block_table.{cache.group}",))
        self._input("query_start", ("query_start",))
        self._input("lengths", ("lengths",))
        q, y = self._heads("q"), self._heads("y")
        if q.shape[1] != cache.key_dim or y.shape != (q.shape[0], cache.value_dim):
            raise _Refusal(f"q {q.shape} -> {y.shape} with cache {cache}")
        if q.shape[0] % cache.heads or {q.dtype, y.dtype} != {cache.dtype}:
            raise _Refusal(f"q {q.dtype}{q.shape} with cache {cache}")
        if not 0 <= self._integer("window") < MAX_SIZE or self.step.rows != "tokens":
            raise _Refusal(f"window {self.step.params['window']}, per {self.step.rows}")

    def gather_rows(self) -> None:
        self._input("index", ("rows",))
        x, y = self._matrix("x", rows="tokens"), self._matrix("y")
        self._same_shape(x, y)
        if self.step.rows != "rows":
            raise _Refusal(f"gathers per {self.step.rows}")

    def unary(self) -> None:
        self._same_shape(self._strided("x"), self._strided("y"), dtypes=False)

    def binary(self) -> None:
        y = self._strided("y")
        self._same_shape(self._strided("a"), y, dtypes=False)
        if "b" in self.operands:
            self._same_shape(self._strided("b"), y, dtypes=False)

    def reduce(self) -> None:
        x, y, reduced = self._strided("x"), self._strided("y"), self._integer("reduced")
        if not 0 < reduced <= len(x.shape) or x.shape[: len(x.shape) - reduced] != y.shape:
            raise _Refusal(f"{x.shape} reduced by {reduced} axes to {y.shape}")

    def softmax(self) -> None:
        x = self._strided("x")
        self._same_shape(x, self._strided("y"), dtypes=False)
        if not x.shape:
            raise _Refusal("no axis to normalise")

    # --- operands ---

    def _integer(self, name: str) -> int:
        value = self.step.params[name]
        if not isinstance(value, int) or not -MAX_SIZE < value < MAX_SIZE:
            raise _Refusal(f"parameter {name} is {value!r}")
        return value

    def _in_arena(self, name: str, rows: str | None = None) -> Ref:
        """An arena operand whose buffer has the step's row count (or `rows`)."""
        ref = _arena_view(self.template, self.operands[name])
        found, wanted = self.template.buffers[ref.index].rows, rows or self.step.rows
        if found != wanted:
            raise _Refusal(f"{name} has {found} as rows, the step {wanted}")
        return ref

    def _matrix(self, name: str, heads: bool = False, rows: str | None = None) -> Ref:
        """An operand whose row is one run of elements; with `heads`, adjacent vectors."""
        ref = self._in_arena(name, rows)
        if not ref.adjacent or not ref.shape or (heads and len(ref.shape) > 2):
            raise _Refusal(f"{name} has shape {ref.shape} and strides {ref.strides}")
        if ref.dtype not in ("f32", "bf16"):
            raise _Refusal(f"{name} is {ref.dtype}")
        return ref

    def _heads(self, name: str) -> Ref:
        ref = self._matrix(name, heads=True)
        if len(ref.shape) != 2 or ref.shape[1] > MAX_HEAD_DIM or ref.shape[0] > 1 << 16:
            raise _Refusal(f"{name} has shape {ref.shape}, wanted [heads, head_dim]")
        return ref

    def _strided(self, name: str) -> Ref:
        """An operand of a general kernel: an arena view, or a weight that is the same each row."""
        ref = self.operands[name]
        if ref.space != "weights":
            return self._in_arena(name)
        slot = self._slot(ref, name)
        if slot.layout != "rows" or name in ("y",):
            raise _Refusal(f"{name} can't be weight {slot.name!r}")
        if slot.dtype != ref.dtype:
            raise _Refusal(f"{name} reads {slot.dtype} weight {slot.name!r} as {ref.dtype}")
        _check_span(ref, slot.stored_bytes)
        return ref

    def _residual(self, x: Ref) -> None:
        """residual and sum of a norm: shaped as its input, and sum only beside a residual."""
        if "sum" in self.operands and "residual" not in self.operands:
            raise _Refusal("a sum without a residual")
        for name in ("residual", "sum"):
            if name in self.operands:
                other = self._matrix(name, heads=True)
                if other.width != x.width or other.dtype != x.dtype:
                    raise _Refusal(f"{name} is {other.dtype}[{other.width}], x {x.width}")

    def _slot(self, ref: Ref, name: str) -> WeightSlot:
        if ref.space != "weights" or not 0 <= ref.index < len(self.template.weights):
            raise _Refusal(f"{name} is no weight: {ref.space} {ref.index}")
        return self.template.weights[ref.index]

    def _weight(self, name: str) -> WeightSlot:
        """A weight that is read whole."""
        ref = self.operands[name]
        slot = self._slot(ref, name)
        if ref.offset or (ref.shape and ref.shape != slot.shape):
            raise _Refusal(f"{name} is a part of {slot.name}, not the whole of it")
        return slot

    def _vector(self, name: str, width: int, dtype: str) -> None:
        if name not in self.operands:
            return
        slot = self._weight(name)
        if slot.shape != (width,) or slot.dtype != dtype or slot.layout != "rows":
            raise _Refusal(f"{name} is {slot.dtype}{slot.shape}, wanted {dtype}[{width}]")

    def _cache(self) -> CacheSlot:
        ref = self.operands["cache"]
        if ref.space != "cache" or not 0 <= ref.index < len(self.template.caches):
            raise _Refusal(f"no cache {ref.space} {ref.index}")
        return self.template.caches[ref.index]

    def _input(self, name: str, roles: tuple[str, ...]) -> str:
        ref = self.operands[name]
        if ref.space != "input" or not 0 <= ref.index < len(self.template.inputs):
            raise _Refusal(f"{name} is no input: {ref.space} {ref.index}")
        role = self.template.inputs[ref.index]
        if role not in roles:
            raise _Refusal(f"{name} is input {role}, wanted {' or '.join(roles)}")
        return role

    def _same_shape(self, a: Ref, b: Ref, dtypes: bool = True) -> None:
        if a.shape != b.shape or (dtypes and a.dtype != b.dtype):
            raise _Refusal(f"{a.dtype}{a.shape} against {b.dtype}{b.shape}")

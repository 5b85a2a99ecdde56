"""What the steps of a plan cost at true sizes: arithmetic, and each byte that must move once.

Read off the plan, which is what runs: an operand in the arena is read or written once a row, a
packed matrix is multiplied with every row, a request's cache is read as far as its tokens see.
Looked-up tables count the rows that are looked up. The inputs of a step (ids, slots, block tables:
a few bytes a row) and the padding of layouts are left out. Operations an element are those that
the cost rules of the IR's ops state.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ropeway.compiler.targets.cpu.plan import ITEM_SIZES, Ref, RowKind, Step, Template, WeightSlot
from ropeway.runtime.devices.base import StepInputs

_NORM = 4  # operations an element: square, add, scale, gain
_NORMED_GEMM = 5  # the same, and the residual's addition
_ROTATION = 3  # operations an element that rotates
_LOOKUPS = {"embedding": "table", "rope": "table"}  # kernel -> the operand it reads single rows of


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic and traffic, in operations and bytes."""

    flops: int = 0
    weight_bytes: int = 0
    activation_bytes: int = 0
    kv_bytes: int = 0

    @property
    def bytes(self) -> int:
        """All that moves."""
        return self.weight_bytes + self.activation_bytes + self.kv_bytes

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.activation_bytes + other.activation_bytes,
            self.kv_bytes + other.kv_bytes,
        )


@dataclass(frozen=True)
class StepSizes:
    """The true sizes of a step. `spans` has per request (its first new position, its length).

    `peaks` of the rows are wanted for their largest logit only, so their logits needn't be written.
    """

    tokens: int
    rows: int
    spans: tuple[tuple[int, int], ...]
    peaks: int = 0

    @staticmethod
    def of(inputs: StepInputs) -> "StepSizes":
        """The sizes of these inputs."""
        starts = inputs.query_start.tolist()
        lengths = inputs.lengths.tolist()
        spans = tuple(
            (length - (starts[i + 1] - starts[i]), length) for i, length in enumerate(lengths)
        )
        tokens, _, rows = inputs.counts
        peaks = 0 if inputs.peak_only is None else int(np.count_nonzero(inputs.peak_only))
        return StepSizes(tokens, rows, spans, peaks)

    @cached_property
    def context(self) -> float:
        """Mean length of a request, this step's tokens included."""
        return sum(length for _, length in self.spans) / max(1, len(self.spans))

    def count(self, kind: RowKind) -> int:
        """Rows of a kind."""
        return {"tokens": self.tokens, "requests": len(self.spans), "rows": self.rows}[kind]

    def seen(self, window: int) -> tuple[int, int]:
        """(pairs of a new token and a key it sees, keys that any new token sees), over requests."""
        return _seen(self.spans, window)


@lru_cache(maxsize=64)
def _seen(spans: tuple[tuple[int, int], ...], window: int) -> tuple[int, int]:
    pairs, keys = 0, 0
    for first, length in spans:
        if not window:
            pairs += (first + 1 + length) * (length - first) // 2
            keys += length
            continue
        pairs += sum(min(at + 1, window) for at in range(first, length))
        keys += length - max(0, first + 1 - window)
    return pairs, keys


def step_work(template: Template, step: Step, sizes: StepSizes) -> Work:
    """The work of one plan step. Kernels that aren't known count their operands alone."""
    rows = sizes.count(step.rows)
    weights, activations = 0, 0
    for name, ref in step.operands.items():
        if ref.space == "arena":
            unwritten = sizes.peaks if ref.index == template.logits.index else 0
            activations += (rows - unwritten) * ref.width * ITEM_SIZES[ref.dtype]
        elif ref.space == "weights":
            looked_up = _LOOKUPS.get(step.kernel) == name
            weights += _weight_bytes(template, ref, rows if looked_up else None)
    return Work(
        _flops(template, step, sizes, rows), weights, activations, _kv_bytes(template, step, sizes)
    )


def plan_work(template: Template, sizes: StepSizes) -> list[Work]:
    """The work of every plan step, in order."""
    return [step_work(template, step, sizes) for step in template.steps]


def packed_matrix(template: Template, step: Step) -> WeightSlot | None:
    """The matrix [N, K] that a step multiplies each row with; None when there is none."""
    for name, ref in step.operands.items():
        if ref.space == "weights" and _LOOKUPS.get(step.kernel) != name:
            slot = template.weights[ref.index]
            if slot.layout != "rows":
                return slot
    return None


def _weight_bytes(template: Template, ref: Ref, rows: int | None) -> int:
    """A whole weight, or `rows` of its rows."""
    shape = template.weights[ref.index].shape
    items = math.prod(shape) if rows is None else rows * math.prod(shape[1:])
    return items * ITEM_SIZES[template.weights[ref.index].dtype]


def _flops(template: Template, step: Step, sizes: StepSizes, rows: int) -> int:
    if step.kernel == "attention":
        slot = template.caches[step.operands["cache"].index]
        pairs, _ = sizes.seen(int(step.params["window"]))
        return 2 * pairs * step.operands["q"].shape[0] * (slot.key_dim + slot.value_dim)
    x, matrix = step.operands.get("x"), packed_matrix(template, step)
    if matrix is not None:
        normed = _NORMED_GEMM * rows * x.width if x and step.params.get("norm") else 0
        return 2 * rows * math.prod(matrix.shape) + normed
    return rows * _vector_flops(step)


def _vector_flops(step: Step) -> int:
    """Operations a row of a kernel without a matrix."""
    operands = step.operands
    match step.kernel:
        case "rms_norm" | "layer_norm" | "softmax":
            return _NORM * operands["x"].width
        case "rope":
            heads = sum(operands[name].shape[0] for name in ("q", "k") if name in operands)
            return _ROTATION * heads * int(step.params["rotary_dim"])
        case "reduce":
            return operands["x"].width
        case "glu" | "binary":
            return operands["y"].width
        case "unary":
            return 0 if step.params["op"] == "copy" else operands["y"].width
    return 0


def _kv_bytes(template: Template, step: Step, sizes: StepSizes) -> int:
    """Bytes of cache that a step reads (attention) or writes."""
    cache = step.operands.get("cache")
    if cache is None:
        return 0
    slot = template.caches[cache.index]
    token = slot.heads * (slot.key_dim + slot.value_dim) * ITEM_SIZES[slot.dtype]
    if step.kernel == "attention":
        return sizes.seen(int(step.params["window"]))[1] * token
    return sizes.tokens * token

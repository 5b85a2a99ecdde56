"""ctypes twins of the structures in runtime/kernels (executor.h, step_queue.h), and a checked plan
packed in them.

`sizes_match` compares sizes with the library's own, so a stale build is refused, not misread.
"""

import ctypes
from collections.abc import Mapping

from ropeway.compiler.artifact.weights import WeightFile
from ropeway.compiler.errors import ArtifactError
from ropeway.compiler.targets.cpu.kernel_table import KERNELS, MAX_DIMS, NUMBERS, Kernel
from ropeway.compiler.targets.cpu.plan import Ref, Step, Template
from ropeway.runtime.sampling.native import SampleArgs

_I32, _I64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_OPERANDS, _INTS, _FLOATS = 8, 4, 2

_SPACES = {"arena": 0, "weights": 1, "input": 2, "cache": 3}
_DTYPES = {"f32": 0, "bf16": 1, "i32": 3}
_ROWS = {"tokens": 0, "requests": 1, "rows": 2}
_ROLES = {
    "ids": 0,
    "positions": 1,
    "rows": 2,
    "query_start": 3,
    "lengths": 4,
    "slots": 5,
    "block_table": 6,
}


class RefRecord(ctypes.Structure):
    """An operand."""

    _fields_ = [
        ("space", _I32),
        ("index", _I32),
        ("dtype", _I32),
        ("dims", _I32),
        ("offset", _I64),
        ("shape", _I64 * (MAX_DIMS - 1)),
        ("stride", _I64 * (MAX_DIMS - 1)),
    ]


class StepRecord(ctypes.Structure):
    """A kernel call."""

    _fields_ = [
        ("kernel", _I32),
        ("rows", _I32),
        ("refs", RefRecord * _OPERANDS),
        ("ints", _I64 * _INTS),
        ("floats", ctypes.c_double * _FLOATS),
    ]


class WeightRecord(ctypes.Structure):
    """A weight in memory."""

    _fields_ = [("data", _PTR), ("rows", _I64), ("width", _I64), ("dtype", _I32), ("packed", _I32)]


class CacheRecord(ctypes.Structure):
    """One layer's cache."""

    _fields_ = [
        ("group", _I32),
        ("heads", _I32),
        ("key_dim", _I32),
        ("value_dim", _I32),
        ("dtype", _I32),
        ("padding", _I32),
    ]


class ProgramSpec(ctypes.Structure):
    """`RwProgramSpec` of capi.cpp."""

    _fields_ = [
        ("steps", ctypes.POINTER(StepRecord)),
        ("weights", ctypes.POINTER(WeightRecord)),
        ("caches", ctypes.POINTER(CacheRecord)),
        ("row_bytes", ctypes.POINTER(_I64)),
        ("step_count", _I64),
        ("weight_count", _I64),
        ("cache_count", _I64),
        ("buffer_count", _I64),
        ("max_length", _I64),
        ("groups", _I64),
        ("head", _I64),
        ("arena", _PTR),
    ]


class StepData(ctypes.Structure):
    """The host inputs of one step."""

    _fields_ = [
        ("tokens", _I64),
        ("requests", _I64),
        ("rows", _I64),
        ("ids", _PTR),
        ("positions", _PTR),
        ("row_index", _PTR),
        ("query_start", _PTR),
        ("lengths", _PTR),
        ("slots", ctypes.POINTER(_PTR)),
        ("block_tables", ctypes.POINTER(_PTR)),
        ("table_widths", ctypes.POINTER(_I64)),
        ("groups", _I64),
        ("peak_only", _PTR),
    ]


class RunReport(ctypes.Structure):
    """Why a step was refused; fault 0 when it ran."""

    _fields_ = [
        ("fault", _I32),
        ("group", _I32),
        ("where", _I64),
        ("value", _I64),
        ("limit", _I64),
    ]


class Peaks(ctypes.Structure):
    """Where the last step's largest logits are, in parts."""

    _fields_ = [("parts", _PTR), ("count", _I64), ("rows", _I64)]


class SlotFill(ctypes.Structure):
    """A penalty slot's new content."""

    _fields_ = [
        ("slot", _I64),
        ("prompt", _PTR),
        ("prompt_count", _I64),
        ("output", _PTR),
        ("output_count", _I64),
    ]


class JobRecord(ctypes.Structure):
    """`StepJob` of step_queue.h."""

    _fields_ = [
        ("bucket", _I32),
        ("follows", _I32),
        ("data", StepData),
        ("feed", _PTR),
        ("ids", _PTR),
        ("slots", ctypes.POINTER(_PTR)),
        ("copies", ctypes.POINTER(_I64)),
        ("copy_count", _I64),
        ("fills", ctypes.POINTER(SlotFill)),
        ("fill_count", _I64),
        ("sample", SampleArgs),
        ("report", RunReport),
    ]


_RECORDS = (
    RefRecord,
    StepRecord,
    WeightRecord,
    CacheRecord,
    StepData,
    RunReport,
    Peaks,
    SlotFill,
    JobRecord,
)


def sizes_match(library: ctypes.CDLL) -> bool:
    """Whether the library's structures have the sizes of these."""
    return all(
        library.rw_record_bytes(number) == ctypes.sizeof(record)
        for number, record in enumerate(_RECORDS)
    )


def declare(library: ctypes.CDLL) -> None:
    """Type the executor's functions. Raises AttributeError when one is missing."""
    functions: Mapping[str, tuple[object, list[object]]] = {
        "rw_plan_signatures": (ctypes.c_char_p, []),
        "rw_available_kernels": (ctypes.c_char_p, []),
        "rw_select_kernels": (ctypes.c_char_p, [ctypes.c_char_p]),
        "rw_record_bytes": (_I32, [_I32]),
        "rw_team_create": (_PTR, [_I32, _I32]),
        "rw_team_destroy": (None, [_PTR]),
        "rw_team_run": (None, [_PTR, _PTR, _PTR]),
        "rw_team_read": (ctypes.c_uint64, [_PTR, _PTR, _I64]),
        "rw_program_create": (_PTR, [_PTR, ctypes.POINTER(ProgramSpec), ctypes.c_char_p]),
        "rw_program_destroy": (None, [_PTR]),
        "rw_program_add_bucket": (_I32, [_PTR, _I64, _I64, _I64, ctypes.POINTER(_I64)]),
        "rw_program_set_caches": (
            None,
            [_PTR, _PTR, ctypes.POINTER(_I64), ctypes.POINTER(_I64), _I64, _I64],
        ),
        "rw_program_copy_blocks": (None, [_PTR, ctypes.POINTER(_I64), _I64]),
        "rw_program_peaks": (None, [_PTR, ctypes.POINTER(Peaks)]),
        "rw_queue_create": (_PTR, [_PTR, _PTR, _I32]),
        "rw_queue_destroy": (None, [_PTR]),
        "rw_queue_post": (_I64, [_PTR, ctypes.POINTER(JobRecord)]),
        "rw_queue_wait": (None, [_PTR, ctypes.c_uint32]),
        "rw_queue_drain": (None, [_PTR]),
        "rw_queue_cancel": (None, [_PTR]),
        "rw_program_run_together": (
            None,
            [
                _PTR,
                ctypes.POINTER(_I32),
                ctypes.POINTER(StepData),
                _I64,
                _I64,
                ctypes.POINTER(RunReport),
            ],
        ),
        "rw_program_run": (
            None,
            [
                _PTR,
                _I32,
                ctypes.POINTER(StepData),
                _I64,
                ctypes.POINTER(_I64),
                ctypes.POINTER(RunReport),
            ],
        ),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments


def pack_steps(template: Template) -> ctypes.Array[StepRecord]:
    """The steps of a checked template."""
    packed = (StepRecord * len(template.steps))()
    for record, step in zip(packed, template.steps, strict=True):
        _pack_step(record, step, KERNELS[step.kernel], template)
    return packed


def _pack_step(record: StepRecord, step: Step, kernel: Kernel, template: Template) -> None:
    record.kernel = NUMBERS[step.kernel]
    record.rows = _ROWS[step.rows]
    for number in range(_OPERANDS):
        record.refs[number].space = -1
    for number, name in enumerate(kernel.operand_names):
        ref = step.operands.get(name)
        if ref is not None:
            _pack_ref(record.refs[number], ref, template)
    chosen = [choices.index(str(step.params[name])) for name, choices in kernel.choices]
    for number, value in enumerate([*(int(step.params[name]) for name in kernel.ints), *chosen]):
        record.ints[number] = value
    for number, name in enumerate(kernel.floats):
        record.floats[number] = float(step.params[name])


def _pack_ref(record: RefRecord, ref: Ref, template: Template) -> None:
    record.space = _SPACES[ref.space]
    record.dtype = _DTYPES[ref.dtype]
    if ref.space == "input":
        role, _, group = template.inputs[ref.index].partition(".")
        record.index, record.offset = _ROLES[role], int(group or 0)
        return
    record.index, record.offset, record.dims = ref.index, ref.offset, len(ref.shape)
    for axis, (size, stride) in enumerate(zip(ref.shape, ref.strides, strict=True)):
        record.shape[axis], record.stride[axis] = size, stride


def pack_weights(template: Template, file: WeightFile) -> ctypes.Array[WeightRecord]:
    """The weights of a template where the mapped file has them.

    Raises ArtifactError when one is missing or isn't stored as the template says.
    """
    packed = (WeightRecord * len(template.weights))()
    for record, slot in zip(packed, template.weights, strict=True):
        stored = file.tensors.get(slot.name)
        if stored is None:
            raise ArtifactError(f"{file.path}: weight {slot.name!r} is missing: compile again")
        if (stored.dtype, stored.shape) != (slot.dtype, slot.stored_shape):
            raise ArtifactError(
                f"{file.path}: weight {slot.name!r} is stored as {stored.dtype}{stored.shape}, the "
                f"plan reads {slot.dtype}{slot.stored_shape}: compile again"
            )
        record.data = file.address + stored.offset
        record.width = slot.shape[-1]
        record.rows = slot.shape[0] if len(slot.shape) > 1 else 1
        record.dtype = _DTYPES[slot.dtype]
        record.packed = int(slot.layout != "rows")
    return packed


def pack_caches(template: Template) -> ctypes.Array[CacheRecord]:
    """The caches of a template."""
    packed = (CacheRecord * len(template.caches))()
    for record, slot in zip(packed, template.caches, strict=True):
        record.group, record.heads = slot.group, slot.heads
        record.key_dim, record.value_dim = slot.key_dim, slot.value_dim
        record.dtype = _DTYPES[slot.dtype]
    return packed

"""A legalized module becomes a plan template, and a plan per bucket.

Buckets differ in sizes alone, so ops are lowered once, with T, R and L as the names of row counts;
a bucket adds the offsets of the buffers. Lowering 15 buckets costs as much as lowering one.
"""

from collections.abc import Sequence

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import TargetError
from ropeway.compiler.ir.graph import Function, Module
from ropeway.compiler.ir.types import CacheType
from ropeway.compiler.targets.base import BucketMemory, CacheGroupPlan, Payload
from ropeway.compiler.targets.cpu.builder import PlanBuilder, refuse
from ropeway.compiler.targets.cpu.cache_layout import group_plans
from ropeway.compiler.targets.cpu.kernel_table import BLOCK_TOKENS
from ropeway.compiler.targets.cpu.memory import buffer_sizes, lifetimes, plan_bucket
from ropeway.compiler.targets.cpu.op_lowering import LOWERINGS
from ropeway.compiler.targets.cpu.plan import (
    PLAN_VERSION,
    TEMPLATE_FILE,
    Ref,
    Template,
    bucket_file,
    encode,
)
from ropeway.compiler.targets.cpu.plan_checks import check_bucket, check_template

_INPUT_ROLES = ("ids", "positions", "rows", "query_start", "lengths")


def lower_template(module: Module) -> Template:
    """The template of the module's function. Raises TargetError naming op and source line."""
    function = module.fn
    plan = PlanBuilder(function)
    _bind_inputs(plan, function)
    for op in function.ops:
        lowering = LOWERINGS.get(op.name)
        if lowering is None:
            raise refuse(op, "it has no kernel")
        lowering(plan, op)
    template = Template(
        version=PLAN_VERSION,
        block_size=BLOCK_TOKENS,
        inputs=plan.inputs,
        weights=plan.weights,
        caches=plan.caches,
        buffers=plan.buffers,
        steps=plan.steps,
        logits=_logits(plan, function),
        max_length=max_length(module),
    )
    check_template(template)
    return template


def lower(module: Module, buckets: Sequence[Bucket]) -> Payload:
    """The files of all buckets. Raises TargetError naming op and source line."""
    template = lower_template(module)
    alive = lifetimes(template)
    graphs: dict[Bucket, tuple[str, bytes]] = {}
    memory: list[BucketMemory] = []
    for bucket in buckets:
        plan = plan_bucket(template, alive, bucket)
        where = bucket_file(bucket)
        check_bucket(template, plan, bucket, where)
        graphs[bucket] = (where, encode(plan))
        sizes = buffer_sizes(template, bucket)
        memory.append(BucketMemory(bucket, plan.arena_bytes, len(sizes), sum(sizes)))
    groups: tuple[CacheGroupPlan, ...] = group_plans(template.caches)
    return Payload(graphs, {TEMPLATE_FILE: encode(template)}, groups, tuple(memory))


def max_length(module: Module) -> int:
    """The longest request in tokens: metadata `max_model_len`, else the upper end of dim T."""
    found = module.metadata.get("max_model_len", module.dims.get("T", (0, 0))[1])
    if not isinstance(found, int) or found <= 0:
        raise TargetError(
            f"module @{module.name} doesn't say how long a request may be (metadata "
            f"max_model_len is {found!r}): compile with max_model_len=N"
        )
    return found


def _bind_inputs(plan: PlanBuilder, function: Function) -> None:
    for entry in function.inputs:
        role, _, group = entry.role.partition(".")
        if isinstance(entry.value.type, CacheType):
            plan.bind_cache(entry.value)
        elif role in _INPUT_ROLES or (role in ("slots", "block_table") and group.isdigit()):
            plan.bind_input(entry.value, entry.role)
        else:
            raise TargetError(
                f"target cpu doesn't know how to fill input %{entry.value.name} with role "
                f"{entry.role!r} of @{function.name}: compile for target reference"
            )


def _logits(plan: PlanBuilder, function: Function) -> Ref:
    value = function.output("logits")
    if value is None or len(function.outputs) != 1 or value.producer is None:
        roles = [role for _, role in function.outputs]
        raise TargetError(
            f"target cpu needs @{function.name} to return logits and nothing else, not {roles}"
        )
    ref = plan.view(value.producer, value).ref
    if ref.dtype != "f32" or plan.buffers[ref.index].rows != "rows":
        raise refuse(
            value.producer,
            f"logits are {value.type}, not f32 with one row per wanted row",
            "run the pass lower-lm-head",
        )
    return ref

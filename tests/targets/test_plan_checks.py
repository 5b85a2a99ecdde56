"""Hostile plans: a mutated plan is refused with an ArtifactError, or it runs; it never crashes.

The mutations change the JSON of real plans, and what is let through is run.
"""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cpu_programs import FAST, compile_decoder

from ropeway.compiler.config import Bucket
from ropeway.compiler.errors import ArtifactError, RunError
from ropeway.compiler.targets.cpu.plan import (
    TEMPLATE_FILE,
    Template,
    decode_bucket,
    decode_template,
)
from ropeway.compiler.targets.cpu.plan_checks import check_bucket, check_template
from ropeway.runtime.devices.cpu.native import Team
from ropeway.runtime.devices.cpu.program import CacheMemory, Program
from ropeway.runtime.selfcheck import small_step

BUCKET = Bucket("decode", 2, 2, 2)
SMALL = replace(FAST, layers=1, hidden=32, inter=48, vocab=40, positions=64, qk_norm=True)


@pytest.fixture(scope="module")
def plans() -> tuple[bytes, bytes]:
    compiled = compile_decoder(SMALL, buckets=[BUCKET])
    return compiled.payload.files[TEMPLATE_FILE], compiled.payload.graphs[BUCKET][1]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory):
    artifact = compile_decoder(SMALL, buckets=[BUCKET]).write(tmp_path_factory.mktemp("p") / "a")
    team = Team(1)
    yield artifact, team
    team.close()


NUMBERS = st.sampled_from(
    [0, 1, 2, 3, 16, 31, 32, 33, 64, 65, 4096, 2**31 - 1, 2**31, 2**40, 2**63 - 1, -1, -64]
)


def leaves(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every scalar and of every removable item."""
    if isinstance(node, dict):
        return [p for key, value in node.items() for p in leaves(value, (*path, key))]
    if isinstance(node, list):
        return [p for key, value in enumerate(node) for p in leaves(value, (*path, key))]
    return [path]


def mutate(node: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value


def run_once(template: Template, plan: Any, loaded: Any) -> None:
    """Loads and runs a plan that was let through."""
    artifact, team = loaded
    program = Program(template, {plan.bucket: plan}, artifact.weights, team)
    program.set_caches(CacheMemory(template, 4))
    program.run(plan.bucket, small_step(plan.bucket, program.groups))
    program.close()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_mutated_plan_is_refused_or_runs(plans, loaded, data):
    template, bucket = (json.loads(part) for part in plans)
    both = {"template": template, "bucket": bucket}
    paths = leaves(both)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(paths))
        old = both
        for key in path:
            old = old[key]
        if isinstance(old, str):
            new = data.draw(
                st.sampled_from(["f32", "bf16", "rows", "tokens", "requests", "x", "y"])
            )
        elif isinstance(old, int):
            new = data.draw(NUMBERS)
        else:
            new = data.draw(st.sampled_from([0.0, 1e30, None, "nan"]))
        mutate(both, path, new)
    try:
        parsed = decode_template(json.dumps(template).encode())
        check_template(parsed)
        plan = decode_bucket(json.dumps(bucket).encode(), "b")
        check_bucket(parsed, plan, BUCKET, "b")
        run_once(parsed, plan, loaded)
    except (ArtifactError, RunError) as error:  # RunError: an arena that no machine has
        assert "compile" in str(error)


def edited(plans: tuple[bytes, bytes], change: Any) -> Template:
    """The template after `change(dict)`."""
    raw = json.loads(plans[0])
    change(raw)
    return decode_template(json.dumps(raw).encode())


def step_index(raw: dict[str, Any], kernel: str) -> int:
    return next(i for i, step in enumerate(raw["steps"]) if step[0] == kernel)


OPERANDS = 3  # of a step, an array: kernel, op, rows, operands, params


def change_ref(kernel: str, operand: str, field: int, value: Any) -> Any:
    def change(raw: dict[str, Any]) -> None:
        raw["steps"][step_index(raw, kernel)][OPERANDS][operand][field] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (change_ref("gemm", "y", 1, 10_000), "no buffer"),
        (change_ref("gemm", "y", 5, 1 << 20), "in a row of"),
        (change_ref("gemm", "y", 5, -4), "a view of bytes -4"),
        (change_ref("gemm", "weight", 1, 999), "no weight"),
        (change_ref("rope", "positions", 1, 0), "wanted positions"),
        (change_ref("kv_write", "cache", 1, 7), "no cache"),
        (change_ref("attention", "y", 3, [4, 64]), "in a row of"),
    ],
    ids=["buffer", "past-row", "before-row", "weight", "input", "cache", "wide"],
)
def test_the_refusal_names_step_op_and_reason(plans, change, says):
    with pytest.raises(ArtifactError) as caught:
        check_template(edited(plans, change), "graphs/template.json")
    text = str(caught.value)
    assert says in text and "graphs/template.json: step " in text and " at m.py:" in text


def test_buffers_must_lie_inside_the_arena(plans):
    template = decode_template(plans[0])
    plan = decode_bucket(plans[1], "b")
    for offsets, arena in (
        ([*plan.offsets[:-1], plan.arena_bytes], plan.arena_bytes),
        ([*plan.offsets[:-1], -64], plan.arena_bytes),
        ([*plan.offsets[:-1], 32], plan.arena_bytes),
        (plan.offsets, plan.arena_bytes - 64),
        (plan.offsets[1:], plan.arena_bytes),
    ):
        changed = msgspec.structs.replace(plan, offsets=offsets, arena_bytes=arena)
        with pytest.raises(ArtifactError, match=r"arena|offsets"):
            check_bucket(template, changed, BUCKET, "b")
    with pytest.raises(ArtifactError, match="not decode-4"):
        check_bucket(template, plan, Bucket("decode", 4, 4, 4), "b")


def test_another_version_is_refused_by_number(plans):
    raw = json.loads(plans[0]) | {"version": 2}
    with pytest.raises(ArtifactError, match="plan version 2, this ropeway reads 1"):
        decode_template(json.dumps(raw).encode())

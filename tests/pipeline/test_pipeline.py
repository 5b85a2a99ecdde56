"""Pipelines: order checked when built, edited as values, run with a report of what ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from support.user_passes import Gives, Mark, Needs, SwapOperands, Takes

from ropeway.compiler.errors import PipelineError
from ropeway.compiler.ir.printer import print_module
from ropeway.compiler.ops.text import read_module
from ropeway.compiler.pipeline.base import Pass
from ropeway.compiler.pipeline.pipeline import Pipeline
from ropeway.compiler.pipeline.report import Report
from ropeway.passes import CATALOGUE, GIVEN, default_pipeline
from ropeway.passes.cleanup.dce import Dce
from ropeway.passes.fusion.attention import FuseAttention
from ropeway.passes.fusion.qkv import FuseQkv


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([Needs()], "pass 'needs' (number 1) requires 'fact', which no pass before it establishes"),
        ([Needs(), Gives()], "which 'gives' establishes only after it: move it behind 'gives'"),
        ([Gives(), Takes(), Needs()], "which 'takes' destroys before it: move it ahead of 'takes'"),
    ],
)
def test_a_wrong_order_is_refused_when_built(passes, message):
    with pytest.raises(PipelineError) as error:
        Pipeline(passes)
    assert message in str(error.value)


def test_an_order_that_works_is_taken():
    assert len(Pipeline([Gives(), Needs(), Takes(), Gives(), Needs()])) == 5
    assert len(Pipeline([Needs()], given={"fact"})) == 1


def test_qkv_after_attention_is_refused():
    with pytest.raises(PipelineError, match="'fuse-attention' destroys before it"):
        Pipeline([FuseAttention(), FuseQkv()], given=GIVEN | {"gqa-raised"})


def test_editing_gives_new_pipelines_and_checks_them():
    base = Pipeline([Gives(), Dce(), Needs(), Dce()])
    assert base.insert_after("dce", Mark()).spec == "gives,dce,needs,dce,mark"
    assert base.insert_before("dce", Mark()).spec == "gives,mark,dce,needs,dce"
    assert base.without("dce").spec == "gives,needs"
    assert base.spec == "gives,dce,needs,dce"
    with pytest.raises(PipelineError, match=r"'needs' .* requires 'fact'"):
        base.without("gives")
    with pytest.raises(PipelineError, match=r"no pass 'fuse-qkv'; it has: gives, dce, needs"):
        base.insert_after("fuse-qkv", Mark())


def test_a_users_pass_runs_where_it_was_put(module):
    pipeline = default_pipeline().insert_after("fuse-qkv", Mark(size=11))
    result, report = pipeline.run(module)
    names = [entry.name for entry in report.passes]
    assert names[names.index("fuse-qkv") + 1] == "mark"
    assert result.metadata["mark"] == 11


def test_the_report_is_of_what_ran(module):
    _, report = default_pipeline().insert_before("fold", Mark(size=4)).run(module)
    mark = next(entry for entry in report.passes if entry.name == "mark")
    assert (mark.spec, mark.phase, mark.numerics) == ("mark{size=4}", "user", "exact")
    assert (mark.matches, mark.sites) == (2, ("here", "there"))
    assert [(miss.constraint, miss.count) for miss in mark.near_misses] == [("near", 1), ("far", 2)]
    assert ",canonicalize,mark{size=4},fold,cse,dce,fuse-qkv," in report.spec
    assert mark.ops_before == mark.ops_after == len(module.fn.ops)
    assert Report.from_json(report.to_json()) == report
    qkv = next(entry for entry in report.passes if entry.name == "fuse-qkv")
    assert (qkv.matches, qkv.sites, qkv.ops_after - qkv.ops_before) == (1, ("m.py:18",), 1)
    text = report.describe()
    assert "fuse-qkv" in text
    assert "1 matched" in text
    assert "1 not matched: nn.embedding %x1 (m.py:1): the normed value must come from" in text


def test_the_input_module_stays_as_it_is(module):
    before = print_module(module)
    default_pipeline().run(module)
    assert print_module(module) == before


def test_runs_are_deterministic(module):
    results = [default_pipeline().run(module)[0] for _ in range(2)]
    assert print_module(results[0]) == print_module(results[1])


def test_the_result_is_always_verified_and_each_state_on_demand(module):
    with pytest.raises(PipelineError, match=r"pass 'swap-operands' \(number 2\) left a module"):
        Pipeline([Dce(), SwapOperands()]).run(module)
    with pytest.raises(PipelineError, match=r"pass 'swap-operands' \(number 1\) left a module"):
        Pipeline([SwapOperands(), Mark()]).run(module, verify_each=True)
    with pytest.raises(PipelineError, match=r"pass 'mark' \(number 2\)"):
        Pipeline([SwapOperands(), Mark()]).run(module)


def test_dumps_are_ir_that_reads_back(module, tmp_path):
    result, _ = default_pipeline().run(module, dump=tmp_path / "dump")
    files = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert files[0] == "00-input.ir"
    place = [item.name for item in default_pipeline()].index("fuse-qkv") + 1
    assert files[place] == f"{place:02d}-fuse-qkv.ir"
    assert len(files) == len(default_pipeline()) + 1
    states = [read_module((tmp_path / "dump" / name).read_text()) for name in files]
    assert states[0] == module
    assert states[-1] == result


def test_a_pass_that_returns_no_result_is_named(module):
    @dataclass(frozen=True)
    class Bare(Pass):
        name: ClassVar[str] = "bare"

        def run(self, module, ctx):
            return module

    with pytest.raises(PipelineError, match=r"pass 'bare' returned Module, not a PassResult"):
        Pipeline([Bare()]).run(module)


def test_strict_fusion_looks_at_fusions_only(module):
    Pipeline.parse("canonicalize,fold,fuse-qkv", CATALOGUE).run(module, strict_fusion=True)
    merged, _ = Pipeline([FuseQkv()], given=GIVEN).run(module)
    with pytest.raises(PipelineError, match=r"q, k and v are one nn.linear already"):
        Pipeline([FuseQkv()], given=GIVEN).run(merged, strict_fusion=True)


def test_a_strict_miss_without_any_candidate_says_so():
    text = """module @m format 1 { func @f(%x: f32[2, 2]) -> f32[2, 2] {
      %y = nn.silu(%x) : f32[2, 2]
      return %y } }"""
    with pytest.raises(PipelineError, match="no op resembles its pattern"):
        Pipeline([FuseQkv()], given=GIVEN).run(read_module(text), strict_fusion=True)


def test_every_pass_of_the_default_pipeline_is_in_the_catalogue():
    assert {item.name: type(item) for item in default_pipeline()}.items() <= CATALOGUE.items()
    assert all(kind().name == name for name, kind in CATALOGUE.items())

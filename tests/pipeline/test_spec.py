"""Spec strings: print and parse are inverse; faults name the place and the next step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.user_passes import Gives, Mark, Needs

from ropeway.compiler.errors import IRSyntaxError, PipelineError
from ropeway.compiler.pipeline.pipeline import Pipeline
from ropeway.compiler.pipeline.spec import parse_spec, print_spec
from ropeway.passes import CATALOGUE, GIVEN, default_pipeline
from ropeway.passes.fusion.attention import FuseAttention

KNOWN = {**CATALOGUE, "mark": Mark, "gives": Gives, "needs": Needs}

marks = st.builds(
    Mark,
    size=st.integers(),
    ratio=st.floats(allow_nan=False),
    label=st.text(),
    deep=st.booleans(),
    axes=st.lists(st.integers(), max_size=3).map(tuple),
    names=st.lists(st.text(max_size=5), max_size=3).map(tuple),
)
plain = st.sampled_from([kind() for kind in CATALOGUE.values()])
attentions = st.builds(FuseAttention, block_size=st.integers(1, 512))


@settings(max_examples=200, deadline=None)
@given(st.lists(marks | plain | attentions, max_size=6))
def test_round_trip(passes):
    text = print_spec(passes)
    again = parse_spec(text, KNOWN)
    assert again == passes
    assert print_spec(again) == text


def test_default_options_are_left_out():
    assert print_spec([Mark(), FuseAttention(), FuseAttention(block_size=16)]) == (
        "mark,fuse-attention,fuse-attention{block-size=16}"
    )
    assert print_spec([Mark(label='a"}', axes=(1, -2), deep=True)]) == (
        'mark{label="a\\"}", deep=true, axes=[1, -2]}'
    )


def test_spaces_and_empty_specs():
    assert parse_spec(" mark { size = 7 , axes = [ ] } , gives{}", KNOWN) == [Mark(size=7), Gives()]
    assert parse_spec("  ", KNOWN) == []


def test_the_default_pipeline_round_trips():
    pipeline = default_pipeline()
    assert Pipeline.parse(pipeline.spec, CATALOGUE, given=GIVEN) == pipeline
    assert pipeline.spec.split(",")[-10:] == [
        "fuse-qkv", "fuse-gate-up", "fuse-swiglu", "fuse-add-norm", "fuse-norm-linear",
        "fuse-rope", "fuse-attention", "lower-lm-head", "canonicalize", "dce",
    ]  # fmt: skip


def test_a_spec_assumes_facts_that_none_of_its_passes_gives():
    assert len(Pipeline.parse("fuse-rope", CATALOGUE)) == 1
    assert len(Pipeline.parse("needs", KNOWN)) == 1
    with pytest.raises(PipelineError, match="'gives' establishes only after it"):
        Pipeline.parse("needs,gives", KNOWN)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("fuse-qvk", PipelineError, "unknown; did you mean 'fuse-qkv'?"),
        ("zzz", PipelineError, "`ropeway opt --list` names them all"),
        ("mark{sise=3}", PipelineError, "has no option 'sise'; it has: size, ratio, label"),
        ("dce{deep=true}", PipelineError, "pass 'dce' has no option 'deep'; it has: none"),
        ("mark{size=3, size=4}", PipelineError, "option 'size' is given twice"),
        ('mark{size="3"}', PipelineError, "pass 'mark': Expected `int`, got `str`"),
        ("mark{size=3.5}", PipelineError, "pass 'mark': Expected `int`, got `float`"),
        ("mark,", IRSyntaxError, "column 6: expected the name of a pass"),
        ("mark{size}", IRSyntaxError, "column 10: expected '='"),
        ("mark{size=}", IRSyntaxError, "column 11: expected a value"),
        ("mark{size=3", IRSyntaxError, "expected '}'"),
        ("mark gives", IRSyntaxError, "column 5: expected ',' or the end of the spec"),
        ("mark{axes=[1,}", IRSyntaxError, "expected a value"),
    ],
)
def test_faults(text, kind, message):
    with pytest.raises(kind) as error:
        parse_spec(text, KNOWN)
    assert message in str(error.value)
    assert "\n" not in str(error.value)

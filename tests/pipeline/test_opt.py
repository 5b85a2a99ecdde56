"""`ropeway opt`: passes on IR text from the command line."""

from __future__ import annotations

import io

import pytest
from support.decoder_text import Shape, decoder_text
from support.user_passes import ScaleLogits

from ropeway.compiler.cli.main import main
from ropeway.compiler.ops.text import read_module
from ropeway.passes import CATALOGUE, default_pipeline


@pytest.fixture
def ir_file(tmp_path):
    path = tmp_path / "step.ir"
    path.write_text(decoder_text(Shape(layers=1)))
    return path


def test_prints_ir_and_reports_on_stderr(ir_file, capsys):
    assert main(["opt", str(ir_file), "-p", "fuse-qkv,dce", "--verify-each"]) == 0
    out, err = capsys.readouterr()
    module = read_module(out)
    assert [op.name for op in module.fn.ops].count("nn.linear") == 6
    assert "fuse-qkv" in err
    assert "1 matched" in err


def test_runs_the_default_pipeline_into_a_file_with_dumps(ir_file, tmp_path, capsys):
    target, dumps = tmp_path / "out.ir", tmp_path / "dumps"
    assert main(["opt", str(ir_file), "-o", str(target), "--dump", str(dumps)]) == 0
    expected, _ = default_pipeline().run(read_module(ir_file.read_text()))
    assert read_module(target.read_text()) == expected
    assert len(list(dumps.iterdir())) == len(default_pipeline()) + 1
    assert capsys.readouterr().out == ""


def test_reads_standard_input(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(decoder_text(Shape(layers=1))))
    assert main(["opt", "-", "-p", "dce"]) == 0
    assert "nn.sdpa" in capsys.readouterr().out


def test_lists_every_pass(capsys):
    assert main(["opt", "--list"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert names == list(CATALOGUE)
    assert lines[lines.index("    {block-size=32}") - 1].startswith("fuse-attention ")


def test_bisect_says_sound_or_names_the_pass(ir_file, monkeypatch, capsys):
    assert main(["opt", str(ir_file), "--bisect"]) == 0
    assert "no pass breaks the module" in capsys.readouterr().out
    monkeypatch.setattr(
        "ropeway.compiler.cli.opt.CATALOGUE", {**CATALOGUE, "scale-logits": ScaleLogits}
    )
    assert main(["opt", str(ir_file), "-p", "cse,fuse-qkv,scale-logits,dce", "--bisect"]) == 1
    err = capsys.readouterr().err
    assert "pass 3 (scale-logits) is the first that breaks it, numerics" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{file}", "-p", "fuse-qvk"], "did you mean 'fuse-qkv'?"),
        (["{file}", "-p", "fuse-qkv{"], "expected the name of an option"),
        (["{file}", "-p", "fuse-attention,fuse-qkv"], "'fuse-attention' destroys before it"),
        (["{file}", "-p", "fuse-attention{block-size=0}"], "block-size 0 must be at least 1"),
        (["{file}.missing"], "can't be read"),
        ([], "no file given"),
        (["{file}", "-p", "dce", "-o", "{file}/out.ir"], "can't be written (Not a directory)"),
        (["{file}", "-p", "dce", "--dump", "{file}/out"], "can't be written (Not a directory)"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(ir_file, arguments, message, capsys):
    assert main(["opt", *(text.replace("{file}", str(ir_file)) for text in arguments)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len([line for line in err.splitlines() if "error:" in line]) == 1
    assert "Traceback" not in err


def test_strict_fusion_names_the_miss(tmp_path, capsys):
    path = tmp_path / "step.ir"
    path.write_text(decoder_text(Shape(layers=1, bias="qv")))
    assert main(["opt", str(path), "-p", "fuse-qkv", "--strict-fusion"]) == 2
    assert "nn.linear %k4 (m.py:12): q, k and v must all have a bias" in capsys.readouterr().err


def test_a_syntax_error_names_the_file(tmp_path, capsys):
    path = tmp_path / "README.md"
    path.write_text("# A readme\n\nwith prose.\n")
    assert main(["opt", str(path), "-p", "dce"]) == 2
    assert f"{path}:" in capsys.readouterr().err


def test_a_file_that_is_no_text_is_refused(tmp_path, capsys):
    path = tmp_path / "step.ir"
    path.write_bytes(b"\xff\xfe\x00")
    assert main(["opt", str(path), "-p", "dce"]) == 2
    assert "can't be read (not UTF-8 text)" in capsys.readouterr().err

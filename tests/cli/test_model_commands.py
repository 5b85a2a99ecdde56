"""compile, inspect, generate and chat on a tiny model, as processes, against transformers."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from support.command import PROGRAM, ropeway
from support.tiny_checkpoint import make_checkpoint

from ropeway.passes import default_pipeline

PROMPT = "0123456789"
TOKENS = 12


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> Callable[[str, int], str]:
    """transformers' greedy continuation of a text, as text."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint)

    def continue_text(text: str, tokens: int) -> str:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        return tokenizer.decode(out[0][ids.shape[1] :], skip_special_tokens=True)

    return continue_text


def test_generate_continues_like_transformers(
    tiny_artifact: Path, reference: Callable[[str, int], str]
) -> None:
    # The pipe is read with universal newlines.
    expected = reference(PROMPT, TOKENS).replace("\r", "\n") + "\n"
    done = ropeway("generate", tiny_artifact, PROMPT, "--max-tokens", TOKENS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected
    assert f"{len(PROMPT)} prompt tokens" in done.stderr
    assert f"{TOKENS} tokens at " in done.stderr
    for text in (PROMPT, PROMPT + "\n"):
        piped = ropeway("generate", tiny_artifact, "-", "--max-tokens", TOKENS, text=text)
        assert piped.stdout == expected
    two = ropeway("generate", tiny_artifact, "-", "--max-tokens", 1, text=PROMPT + "\n\n")
    assert f"{len(PROMPT) + 1} prompt tokens" in two.stderr


def test_generate_says_which_limit_ended_the_answer(tiny_artifact: Path) -> None:
    asked = ropeway("generate", tiny_artifact, PROMPT, "--max-tokens", TOKENS)
    assert asked.stderr.endswith("(length)\n")
    full = ropeway("generate", tiny_artifact, PROMPT * 12, "--max-tokens", 400)
    assert "; 8 tokens at " in full.stderr
    assert full.stderr.endswith("(length: the program's context of 128 tokens is full)\n")


def test_generate_refuses_bad_requests(tiny_artifact: Path) -> None:
    for arguments, word in [
        (("x", "--max-tokens", "0"), "max_tokens"),
        (("x", "--top-p", "2"), "top_p"),
        (("",), "prompt is empty"),
        (("x" * 500,), "128"),
        (("x", "--threads", "0"), "num_threads"),
    ]:
        done = ropeway("generate", tiny_artifact, *arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert word in done.stderr


def test_inspect_says_what_was_fused_and_what_is_needed(tiny_artifact: Path) -> None:
    done = ropeway("inspect", tiny_artifact)
    assert done.returncode == 0, done.stderr
    words = [line.split() for line in done.stdout.splitlines()]
    counts = {line[0]: line[1] for line in words if len(line) > 1 and "-" in line[0]}
    assert counts["fuse-qkv"] == "2"
    assert counts["fuse-attention"] == "2"
    assert counts["lower-lm-head"] == "1"
    # 2 layers x (k, v) x 2 heads x head dim 8 padded to 32 x 4 bytes
    assert "KV bytes per token: 1024; a sequence of full length takes 128.0 KiB" in done.stdout
    assert any(line[:2] == ["decode-1", "arena"] for line in words)
    assert any(line[:2] == ["mixed-64x64x64", "arena"] for line in words)
    assert not any(line[:2] == ["decode-2", "arena"] for line in words)
    assert "and 6 buckets between" in done.stdout
    assert "Not fused: nothing" in done.stdout
    assert "an eighth of the memory" in done.stdout
    full = ropeway("inspect", tiny_artifact, "--memory").stdout
    arenas = [line.split()[0] for line in full.splitlines() if " arena " in line]
    assert arenas == [*(f"decode-{1 << n}" for n in range(7)), "mixed-64x64x64"]
    assert " sequences of 128 tokens" in done.stdout


def test_inspect_as_json_and_as_ir(tiny_artifact: Path) -> None:
    manifest = json.loads(ropeway("inspect", tiny_artifact, "--json").stdout)
    assert manifest["model"]["vocab_size"] == 260
    # embedding and head, and per layer q, k, v, o, gate, up, down and two gains; the last gain
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32
    assert manifest["model"]["parameters"] == 2 * 260 * 32 + 2 * layer + 32
    both = ropeway("inspect", tiny_artifact, "--ir", "--json")
    assert (both.returncode, both.stdout) == (2, "")
    text = ropeway("inspect", tiny_artifact, "--ir").stdout
    assert text == (tiny_artifact / "ir/step.ir").read_text()


def test_damaged_artifact(tiny_artifact: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.rope"
    shutil.copytree(tiny_artifact, copy)
    weights = copy / "weights/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 4
    weights.write_bytes(data)
    for command in (("inspect", copy), ("generate", copy, "x"), ("chat", copy)):
        done = ropeway(*command)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
        assert "weights/model.safetensors" in done.stderr


def test_chat_keeps_the_conversation(tiny_artifact: Path) -> None:
    options = ("--temperature", "0", "--max-tokens", "5")
    done = ropeway("chat", tiny_artifact, *options, text="hi\n\nagain\n/new\nhi\n/quit\nnever\n")
    assert done.returncode == 0, done.stderr
    turns = [line for line in done.stderr.splitlines() if "prompt tokens" in line]
    assert len(turns) == 3
    first, second, third = (int(line.split()[0]) for line in turns)
    # <|user|>hi<|end|><|assistant|>
    assert first == 5
    assert second > first + len("<|user|>again") - len("<|user|>")
    assert third == first


def test_chat_keeps_unknown_commands_from_the_model(tiny_artifact: Path) -> None:
    done = ropeway("chat", tiny_artifact, "--max-tokens", "2", text="/help\n/foo\n/a/b what?\n")
    lines = done.stderr.splitlines()
    assert lines[0].startswith("no command /help: /new starts over, /quit")
    assert lines[1].startswith("no command /foo")
    assert [line for line in lines if "prompt tokens" in line] == lines[2:]
    assert len(lines) == 3


def test_interrupt_at_an_empty_prompt_goes_on(tiny_artifact: Path) -> None:
    """A person at a terminal: Ctrl-C there is a hint, Ctrl-D the end."""
    ours, theirs = os.openpty()
    child = subprocess.Popen(
        [PROGRAM, "chat", tiny_artifact, "--max-tokens", "2"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    assert child.stderr is not None
    assert "Ctrl-C stops an answer" in child.stderr.readline()
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    assert child.stderr.readline().strip() == ""
    assert child.stderr.readline() == "(/quit or Ctrl-D ends)\n"
    os.write(ours, b"hi\n")
    assert "5 prompt tokens" in child.stderr.readline()
    os.write(ours, b"\x04")
    assert child.wait(timeout=20) == 0
    os.close(ours)


def test_what_a_model_came_without(tmp_path: Path) -> None:
    """compile suggests only what can work, and the commands say what is missing."""
    checkpoint = make_checkpoint(tmp_path / "tiny")
    options = ("-o", tmp_path / "m.rope", "--max-num-batched-tokens", "64")
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings))
    done = ropeway("compile", checkpoint, *options)
    assert "no chat template; next: " in done.stderr
    assert f"generate {tmp_path}/m.rope" in done.stderr
    done = ropeway("chat", tmp_path / "m.rope")
    assert (done.returncode, "no chat template" in done.stderr) == (2, True)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (checkpoint / name).unlink()
    done = ropeway("compile", checkpoint, *options)
    assert "no tokenizer came with the model" in done.stderr
    assert f"inspect {tmp_path}/m.rope" in done.stderr
    for command in (("chat", tmp_path / "m.rope"), ("generate", tmp_path / "m.rope", "hi")):
        done = ropeway(*command)
        assert (done.returncode, "use ropeway.LLM" in done.stderr) == (2, True)


def test_chat_outgrows_the_model_and_goes_on(tiny_artifact: Path) -> None:
    options = ("--temperature", "0", "--max-tokens", "5")
    done = ropeway("chat", tiny_artifact, *options, text="x" * 200 + "\nhi\n")
    assert done.returncode == 0
    assert "/new starts over" in done.stderr
    assert "5 prompt tokens" in done.stderr


def test_interrupt_is_130_and_quiet(tiny_artifact: Path) -> None:
    child = subprocess.Popen(
        [PROGRAM, "chat", tiny_artifact, "--max-tokens", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stderr is not None
    child.stdin.write("hi\n")
    child.stdin.flush()
    assert "prompt tokens" in child.stderr.readline()
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=20)
    assert child.returncode == 130
    assert errors == ""


def test_broken_pipe_is_quiet(tiny_artifact: Path) -> None:
    child = subprocess.Popen(
        [PROGRAM, "inspect", tiny_artifact], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(timeout=20) == 1


def test_compile_replaces_its_own_output_only(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.rope"
    options = ("-o", out, "--max-num-batched-tokens", "64", "--target", "reference")
    assert ropeway("compile", tiny_checkpoint, *options).returncode == 0
    (out / "notes.txt").write_text("years of work")
    done = ropeway("compile", tiny_checkpoint, *options)
    assert done.returncode == 2
    assert "notes.txt" in done.stderr
    (out / "notes.txt").unlink()
    assert ropeway("compile", tiny_checkpoint, *options).returncode == 0
    assert sorted(tmp_path.iterdir()) == [out]


def test_compile_refuses_an_artifact(tiny_artifact: Path, tmp_path: Path) -> None:
    done = ropeway("compile", tiny_artifact, "-o", tmp_path / "m.rope")
    assert done.returncode == 2
    assert f"{tiny_artifact}: is compiled already" in done.stderr


def test_strict_fusion_fails_when_nothing_matches(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The second fuse-qkv finds nothing left."""
    spec = default_pipeline().spec.replace("fuse-qkv,", "fuse-qkv,fuse-qkv,")
    options = ("-o", tmp_path / "m.rope", "--pipeline", spec, "--strict-fusion")
    done = ropeway("compile", tiny_checkpoint, *options)
    assert done.returncode == 2
    assert "fuse-qkv" in done.stderr
    assert list(tmp_path.iterdir()) == []

"""Damaged checkpoints: one clear line that says what and where, and nothing half-written."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command import ropeway as command
from support.tiny_checkpoint import make_checkpoint
from support.zoo import save_tiny

import ropeway
from ropeway.compiler.errors import CheckpointError, InputError, RopewayError
from ropeway.compiler.frontend.checkpoints.hf_directory import open_directory
from ropeway.compiler.frontend.checkpoints.hf_tokenizer import read_tokenizer

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Q_PROJ = "model.layers.0.self_attn.q_proj"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("whole") / "tiny")


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def compile_and_save(model: Path, out: Path) -> None:
    ropeway.compile(model, dtype="float32", max_num_batched_tokens=64).save(out)


def refuse(model: Path, tmp_path: Path, *words: str) -> None:
    """Compiling and saving gives one line with `words`, and leaves nothing behind."""
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(InputError) as caught:
        compile_and_save(model, out / "m.rope")
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in text
    assert all(word in text for word in words), text
    assert list(out.iterdir()) == []


def configure(**changes: object) -> Damage:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text()) | changes
        (model / "config.json").write_text(json.dumps(config))

    return change


def write(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda model: (model / name).write_bytes(data)


def retensor(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def rewrite(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors")

    return rewrite


def replace(name: str, tensor: torch.Tensor) -> Damage:
    return retensor(lambda tensors: tensors.update({name: tensor}))


def poke(name: str, value: float) -> Damage:
    return retensor(lambda tensors: tensors[name].view(-1).__setitem__(7, value))


def shard(model: Path) -> dict[str, str]:
    """Splits the weights over two files and an index; gives the index's map."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    files: dict[str, str] = {}
    for number, file in enumerate(SHARDS):
        names = list(tensors)[number::2]
        save_file({name: tensors[name] for name in names}, model / file)
        files |= dict.fromkeys(names, file)
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


def sharded(damage: Damage) -> Damage:
    return lambda model: (shard(model), damage(model))


def indexed(change: Callable[[dict[str, Any]], object]) -> Damage:
    def rewrite(model: Path) -> None:
        index = {"metadata": {}, "weight_map": dict(shard(model))}
        change(index)
        (model / INDEX).write_text(json.dumps(index))

    return rewrite


def map_norm(file: object) -> Damage:
    return indexed(lambda index: index["weight_map"].update({"model.norm.weight": file}))


def swap_norm(index: dict[str, Any]) -> None:
    files = index["weight_map"]
    other = SHARDS[files["model.norm.weight"] == SHARDS[0]]
    files["model.norm.weight"] = other


def rename_in_header(model: Path) -> None:
    """Two entries of the header get one name."""
    file = model / "model.safetensors"
    data = file.read_bytes()
    old, new = b"layers.1.mlp.up_proj", b"layers.0.mlp.up_proj"
    assert data.count(old) == 1
    file.write_bytes(data.replace(old, new))


DAMAGES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no shard": (
        sharded(lambda model: (model / SHARDS[1]).unlink()),
        (SHARDS[1], "missing"),
    ),
    "a truncated shard": (
        sharded(lambda model: os.truncate(model / SHARDS[1], 9000)),
        (SHARDS[1], "truncated"),
    ),
    "a file cut in its header": (
        lambda model: os.truncate(model / "model.safetensors", 100),
        ("model.safetensors", "truncated"),
    ),
    "an empty file": (
        lambda model: os.truncate(model / "model.safetensors", 0),
        ("model.safetensors", "truncated"),
    ),
    "bytes after the last tensor": (
        lambda model: os.truncate(model / "model.safetensors", 1 << 20),
        ("model.safetensors", "too long"),
    ),
    "no weights": (
        lambda model: (model / "model.safetensors").unlink(),
        ("no model.safetensors",),
    ),
    "pickles": (
        lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin"),
        ("pickle", "safe_serialization"),
    ),
    "a wrong shape": (
        replace("model.norm.weight", torch.ones(31)),
        ("model.safetensors", "model.norm.weight", "[31]", "[32]"),
    ),
    "a wrong rank": (
        replace("model.norm.weight", torch.ones(32, 1)),
        ("model.norm.weight", "[32, 1]"),
    ),
    "a missing tensor": (
        retensor(lambda tensors: tensors.pop("model.norm.weight")),
        ("lacks", "model.norm.weight"),
    ),
    "a tensor too many": (
        replace("model.extra.weight", torch.ones(3)),
        ("model.extra.weight",),
    ),
    "a layer too many": (
        configure(num_hidden_layers=1),
        ("model.layers.1.",),
    ),
    "a name twice in a header": (rename_in_header, ("model.safetensors", "twice")),
    "NaN": (
        poke("model.layers.1.mlp.down_proj.weight", float("nan")),
        ("model.safetensors", "model.layers.1.mlp.down_proj.weight", "NaN"),
    ),
    "infinity": (
        poke("lm_head.weight", float("-inf")),
        ("lm_head.weight", "infinity"),
    ),
    "NaN in a gain": (
        poke("model.norm.weight", float("nan")),
        ("model.norm.weight", "NaN"),
    ),
    "an index that isn't JSON": (sharded(write(INDEX, "{")), (INDEX, "JSON")),
    "an index without a map": (indexed(lambda index: index.pop("weight_map")), (INDEX,)),
    "an index that names no file": (map_norm("gone.safetensors"), ("gone.safetensors", INDEX)),
    "an index out of the directory": (map_norm("../x.safetensors"), ("../x.safetensors", INDEX)),
    "an index of numbers": (map_norm(3), ("model.norm.weight", INDEX)),
    "an index that names a config": (map_norm("config.json"), ("config.json", "safetensors")),
    "an index of the wrong shard": (indexed(swap_norm), ("model.norm.weight", INDEX)),
    "an index of a tensor that isn't there": (
        indexed(lambda index: index["weight_map"].update({"model.none": SHARDS[0]})),
        ("model.none", SHARDS[0]),
    ),
    "a tensor in two shards": (
        lambda model: (
            save_file({"model.norm.weight": torch.ones(32)}, model / "more.safetensors"),
            map_norm("more.safetensors")(model),
        ),
        ("model.norm.weight", "more.safetensors"),
    ),
    "no config": (lambda model: (model / "config.json").unlink(), ("config.json", "missing")),
    "a config that isn't JSON": (write("config.json", "{'a': 1}"), ("config.json", "JSON")),
    "a config that isn't text": (write("config.json", b"\xff\xfe\x80"), ("config.json", "JSON")),
    "an empty config": (write("config.json", ""), ("config.json", "JSON")),
    "a config nested too deep": (write("config.json", "[" * 100_000), ("config.json", "JSON")),
    "a config that is a list": (write("config.json", "[]"), ("config.json", "object")),
    "a config of nothing": (write("config.json", "{}"), ("config.json", "model_type")),
    "a model type that isn't a name": (
        configure(model_type=["llama"]),
        ("config.json", "model_type"),
    ),
    "an unknown model type": (configure(model_type="nosuch"), ("config.json", "nosuch")),
    "code from the checkpoint": (
        configure(model_type="nosuch", auto_map={"AutoModelForCausalLM": "x.Y"}),
        ("config.json", "code", "never run"),
    ),
    "1e9 layers": (configure(num_hidden_layers=10**9), ("num_hidden_layers", "1000000000")),
    "1e9 layers, a float": (configure(num_hidden_layers=1e9), ("num_hidden_layers",)),
    "a negative size": (configure(intermediate_size=-48), ("intermediate_size", "-48")),
    "no heads": (configure(num_attention_heads=0), ("num_attention_heads", "0")),
    "heads that can't share": (configure(num_key_value_heads=3), ("4 heads", "3 key/value")),
    "an odd head": (configure(head_dim=7), ("head_dim 7",)),
    "a huge size": (configure(hidden_size=10**30), ("hidden_size",)),
    "a size in quotes": (configure(hidden_size="32"), ("hidden_size", "'32'")),
    "NaN for a number": (configure(rms_norm_eps=float("nan")), ("rms_norm_eps", "nan")),
    "an unknown rope": (
        configure(rope_scaling={"type": "longrope", "factor": 2.0}),
        ("longrope", "yarn"),
    ),
    "a rope without its factor": (configure(rope_scaling={"type": "linear"}), ("factor",)),
    "a tokenizer that isn't JSON": (write("tokenizer.json", "{"), ("tokenizer.json",)),
    "a tokenizer that is a directory": (
        lambda model: ((model / "tokenizer.json").unlink(), (model / "tokenizer.json").mkdir()),
        ("tokenizer.json", "directory"),
    ),
    "tokenizer settings that aren't JSON": (
        write("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "JSON"),
    ),
    "a template that isn't text": (
        write("chat_template.jinja", b"\xff\xfe{{"),
        ("chat_template.jinja", "UTF-8"),
    ),
    "an end token outside the vocabulary": (
        configure(eos_token_id=[256, 10**6]),
        ("1000000", "vocabulary of 260", "eos_token_id"),
    ),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_one_clear_error(
    copy: Path, tmp_path: Path, damage: Damage, words: tuple[str, ...]
) -> None:
    damage(copy)
    refuse(copy, tmp_path, *words)


def test_absurd_depth_of_a_class_of_transformers(tmp_path: Path) -> None:
    """Refused before transformers builds a billion layers."""
    model = save_tiny(tmp_path / "model", "gpt2")
    configure(num_hidden_layers=10**9)(model)
    refuse(model, tmp_path, "num_hidden_layers", "1000000000")


def test_shards_are_read_like_one_file(whole: Path, copy: Path, tmp_path: Path) -> None:
    shard(copy)
    compile_and_save(whole, tmp_path / "one.rope")
    compile_and_save(copy, tmp_path / "two.rope")
    file = "weights/model.safetensors"
    assert (tmp_path / "one.rope" / file).read_bytes() == (
        tmp_path / "two.rope" / file
    ).read_bytes()


def test_the_command_says_it_in_one_line(copy: Path, tmp_path: Path) -> None:
    poke("model.norm.weight", float("nan"))(copy)
    out = tmp_path / "out"
    out.mkdir()
    done = command("compile", copy, "-o", out / "m.rope", "--max-num-batched-tokens", 64)
    assert (done.returncode, done.stdout) == (2, "")
    # A busy machine takes over ten seconds, after which stages are named while they run.
    told = [line for line in done.stderr.splitlines() if not re.search(r", after \d+ s$", line)]
    assert len(told) == 1
    assert "model.norm.weight" in told[0]
    assert list(out.iterdir()) == []


def test_a_damaged_weight_never_reaches_an_llm(copy: Path) -> None:
    """A program that wasn't saved is checked the same."""
    poke("model.norm.weight", float("nan"))(copy)
    program = ropeway.compile(copy, dtype="float32", max_num_batched_tokens=64)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        ropeway.LLM(program)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_a_flipped_byte_is_an_error_or_harmless(copy: Path, name: str) -> None:
    """Any byte of any header: never another kind of error than ours. (Weights have no checksum.)"""
    data = (copy / name).read_bytes()
    header = int.from_bytes(data[:8], "little") + 8 if name == "model.safetensors" else len(data)
    draw = random.Random(name)
    refused = 0
    for _ in range(60):
        damaged = bytearray(data)
        damaged[draw.randrange(header)] ^= 1 << draw.randrange(8)
        (copy / name).write_bytes(damaged)
        try:
            opened = open_directory(copy)
            read_tokenizer(copy, opened.config)
        except RopewayError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 0

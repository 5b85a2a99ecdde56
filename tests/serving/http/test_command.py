"""`ropeway serve` on the command line: what it refuses, and checkpoints that it compiles first."""

import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest
from support.command import PROGRAM, ropeway
from support.server import running_server
from support.tiny_checkpoint import make_checkpoint

from ropeway.compiler.cli.serve import parse_size
from ropeway.compiler.errors import InputError


def refused(*arguments: object) -> str:
    """The one line of a command that is wrong."""
    done = ropeway("serve", *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("ropeway serve: error: ")
    return line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
        (("--host", "203.0.113.7"), "--host"),
        (("--port", "70000"), "--port"),
        (("--api-key-file", "/nothing/there"), "No such file"),
        (("--api-key", ""), "--api-key"),
        (("--api-key", "two words"), "--api-key"),
        (("--kv-cache-memory", "2 cups"), "2GiB"),
        (("--kv-cache-memory", "10"), "kv_cache_memory"),
        (("--max-model-len", "513"), "512"),
        (("--max-num-batched-tokens", "65"), "64"),
        (("--threads", "0"), "threads"),
        (("--chat-template", "/nothing/there"), "No such file"),
        (("--tool-call-parser", "nonsense"), "hermes"),
        (("--reasoning-parser", "nonsense"), "think"),
        (("--unknown-fields", "ignore"), "refuse"),
        (("--log-format", "xml"), "json"),
        (("--drain-timeout", "-1"), "--drain-timeout"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_bad_options(tiny_artifact: Path, options: tuple[str, ...], words: str) -> None:
    assert words in refused(tiny_artifact, "--port", 0, *options)


def test_models_that_arent(tmp_path: Path) -> None:
    assert "doesn't exist" in refused(tmp_path / "no.rope")
    assert "no such file or directory" in refused(tmp_path / "nothing")
    assert "isn't an artifact" in refused(tmp_path)
    (tmp_path / "text.txt").write_text("x")
    assert "not a model" in refused(tmp_path / "text.txt")


def test_a_damaged_artifact(tiny_artifact: Path, tmp_path: Path) -> None:
    copy = tmp_path / "damaged.rope"
    subprocess.run(["cp", "-r", tiny_artifact, copy], check=True)
    manifest = copy / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"tiny"', b'"tinx"'))
    assert "damaged" in refused(copy, "--port", 0)


def test_a_port_in_use(tiny_artifact: Path) -> None:
    with running_server(tiny_artifact) as server:
        port = server.url.rpartition(":")[2]
        assert "already in use" in refused(tiny_artifact, "--port", port)
        assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000000", 1_000_000),
        ("1.5k", 1500),
        ("64KiB", 65_536),
        ("2GiB", 2 << 30),
        ("2gb", 2_000_000_000),
        ("1 TiB", 1 << 40),
        ("3Mi", 3 << 20),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size("--x", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "2 cups", "1..5k", "٣"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match="--x"):
        parse_size("--x", text)


ASKED = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_a_checkpoint_is_compiled_once(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "small")
    environment = {"ROPEWAY_CACHE": str(tmp_path / "cache")}
    texts = []
    for compiled in (True, False):
        with running_server(checkpoint, "--dtype", "float32", environment=environment) as server:
            with server.client() as http:
                assert http.get("/v1/models").json()["data"][0]["id"] == "small"
                answer = http.post("/v1/completions", json=ASKED).json()
                texts.append(answer["choices"][0]["text"])
            maps = Path(f"/proc/{server.pid}/maps").read_text()
            assert "torch" not in maps  # nothing of the compiler stays in memory
            assert len(server.children()) == 1
        assert ("compiled in" in server.text()) == compiled
    assert texts[0] == texts[1]
    [artifact] = (tmp_path / "cache").glob("*.rope")
    (checkpoint / "config.json").write_text(
        json.dumps(json.loads((checkpoint / "config.json").read_text()) | {"rope_theta": 500.0})
    )
    with running_server(checkpoint, "--dtype", "float32", environment=environment) as server:
        assert "compiled in" in server.text()
    assert len(list((tmp_path / "cache").glob("*.rope"))) == 2
    assert artifact.is_dir()


def test_two_servers_compile_the_same_checkpoint(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "small")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [str(PROGRAM), "serve", str(checkpoint), "--port", "0", "--threads", "1"]
    both = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    logs = ["", ""]
    for index, process in enumerate(both):
        assert process.stderr is not None
        while " serves small" not in logs[index]:
            line = process.stderr.readline()
            assert line, logs[index]
            logs[index] += line
    for process in both:
        process.terminate()
        assert process.wait(30) == 0
        assert process.stderr is not None
        process.stderr.close()
    assert sum("compiled in" in log for log in logs) == 1
    assert len(list((tmp_path / "ropeway").glob("*.rope"))) == 1


def test_a_cache_that_cant_be_written(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "small")
    (tmp_path / "file").write_text("")
    command = [str(PROGRAM), "serve", str(checkpoint), "--port", "0"]
    environment = {**os.environ, "ROPEWAY_CACHE": str(tmp_path / "file" / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "can't be used as a cache" in line

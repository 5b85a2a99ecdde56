"""`ropeway serve`: an OpenAI server.

Contract: the engine's process is started before the HTTP side is imported, so that both load at the
same time; what can be refused without either is refused first.
"""

import errno
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from ropeway.compiler.errors import InputError
from ropeway.runtime.engine_options import EngineOptions
from ropeway.serving.process.prestart import take_started
from ropeway.serving.settings import ServerSettings

_ADDRESS, _ACCESS = "Address", "Access and limits"
_ENGINE, _ANSWERS, _TUNING, _LIFE = "Engine", "Requests and answers", "Tuning", "Life and logs"
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[kmgt]?i?)b?", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="An artifact (NAME.rope), or a model as `ropeway compile` takes it, which is "
            "compiled first and kept for the next time."
        ),
    ],
    *,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Address to listen at; 0.0.0.0: all.", rich_help_panel=_ADDRESS
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=65535, help="0: a free one.", rich_help_panel=_ADDRESS
        ),
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What requests call the model; may be repeated. Default: its own name.",
            rich_help_panel=_ADDRESS,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="ROPEWAY_API_KEY",
            help="A key that requests must bring; may be repeated. Others can see it in the list "
            "of processes: the variable or a file is safer.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file of keys, one a line.", rich_help_panel=_ACCESS),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="A web site that may call from a browser, or *; may be repeated.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    max_body_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Of a request.", rich_help_panel=_ACCESS)
    ] = "32MiB",
    max_queued_requests: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Beyond those that run; more get a 429.",
            rich_help_panel=_ACCESS,
        ),
    ] = 512,
    request_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Seconds that a request may take, then a 504; 0: no limit.",
            rich_help_panel=_ACCESS,
        ),
    ] = 0.0,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", help="Threads; default: all cores.", rich_help_panel=_ENGINE),
    ] = None,
    max_num_seqs: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Most sequences at once.", rich_help_panel=_ENGINE),
    ] = 256,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Most tokens in one step; default: the largest bucket.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Most tokens, prompt and output; default: what the model was compiled for.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the KV cache, such as 2GiB; default: what max-num-seqs sequences need, "
            "at most 1/8 of what is free.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    no_enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--no-enable-prefix-caching",
            metavar=" ",
            help="Don't reuse what prompts share.",
            rich_help_panel=_ENGINE,
        ),
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Of a model that is compiled first.", rich_help_panel=_ENGINE
        ),
    ] = "bfloat16",
    unknown_fields: Annotated[
        Literal["refuse", "warn"],
        typer.Option(
            help="A field that doesn't exist is a 400, or dropped with a warning.",
            rich_help_panel=_ANSWERS,
        ),
    ] = "refuse",
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A template instead of the model's.", rich_help_panel=_ANSWERS
        ),
    ] = None,
    tool_call_parser: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How the model writes tool calls: auto, none, hermes, llama3_json or mistral.",
            rich_help_panel=_ANSWERS,
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How the model marks its thinking: auto, none or think.",
            rich_help_panel=_ANSWERS,
        ),
    ] = "auto",
    allow_special_tokens: Annotated[
        bool,
        typer.Option(
            "--allow-special-tokens",
            metavar=" ",
            help="Texts of special tokens in messages are those tokens.",
            rich_help_panel=_ANSWERS,
        ),
    ] = False,
    overlap: Annotated[
        bool | None,
        typer.Option(
            "--overlap/--no-overlap",
            metavar=" ",
            help="Prepare a step while another runs; default: where a core is free.",
            rich_help_panel=_TUNING,
        ),
    ] = None,
    stream_interval: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Least seconds between chunks of a stream; default: by load.",
            rich_help_panel=_TUNING,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(metavar="N", help="For requests that bring none.", rich_help_panel=_TUNING),
    ] = 0,
    drain_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Seconds that requests may finish in at the end.",
            rich_help_panel=_LIFE,
        ),
    ] = 30.0,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            metavar=" ",
            help="Start another engine when it dies, unless it does so over and over.",
            rich_help_panel=_LIFE,
        ),
    ] = False,
    log_requests: Annotated[
        bool,
        typer.Option(
            "--log-requests", metavar=" ", help="A line a request.", rich_help_panel=_LIFE
        ),
    ] = False,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Lines of text or JSON.", rich_help_panel=_LIFE)
    ] = "text",
) -> int:
    """Serve a model to OpenAI clients. SIGTERM and Ctrl-C let open requests finish; a second one
    ends everything at once.

    Example: ropeway serve smollm2.rope

    Example: ropeway serve SmolLM2-135M-Instruct.Q4_1.gguf --max-model-len 2048

    Example: ROPEWAY_API_KEY=secret ropeway serve smollm2.rope --host 0.0.0.0 --restart
    """
    born = time.monotonic()
    settings = ServerSettings(
        host=host,
        port=port,
        served_model_name=tuple(served_model_name or ()),
        api_keys=_keys(api_key or [], api_key_file),
        cors_origins=tuple(cors_origin or ()),
        max_body_bytes=parse_size("--max-body-size", max_body_size),
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        max_queued_requests=max_queued_requests,
        unknown_fields=unknown_fields,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        allow_special_tokens=allow_special_tokens,
        chat_template=None if chat_template is None else _read(chat_template, "--chat-template"),
        restart=restart,
        log_requests=log_requests,
        log_json=log_format == "json",
        stream_interval=stream_interval,
    )
    kv_bytes = None
    if kv_cache_memory is not None:
        kv_bytes = parse_size("--kv-cache-memory", kv_cache_memory)
    options = EngineOptions(
        num_threads=threads,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_cache_memory=kv_bytes,
        enable_prefix_caching=not no_enable_prefix_caching,
        seed=seed,
        overlap=overlap,
    )
    bound = _bind(host, port)
    artifact = Path(model)
    if _is_checkpoint(model):
        artifact = _compiled(model, dtype, max_num_batched_tokens, bound)
    return _run(artifact, options, settings, bound, born)


def _run(
    artifact: Path,
    options: EngineOptions,
    settings: ServerSettings,
    bound: socket.socket,
    born: float,
) -> int:
    from ropeway.serving.process.client import EngineClient  # noqa: PLC0415

    client = EngineClient(artifact, options, settings, child=take_started())
    client.launch()
    from ropeway.serving.http.server import run_server  # noqa: PLC0415

    return run_server(client, settings, bound, born)


def _is_checkpoint(model: str) -> bool:
    """Whether `model` must be compiled first. What is neither is left to the reader of artifacts,
    which says what it is."""
    path = Path(model)
    if path.is_dir():
        return (path / "config.json").exists()
    return path.suffix != ".rope"


def _compiled(model: str, dtype: str, budget: int | None, bound: socket.socket) -> Path:
    """The artifact of a checkpoint. Compiling it ends in running the same command again, with
    nothing of the compiler in memory."""
    from ropeway.compiler.cli.compile_cache import cached_artifact  # noqa: PLC0415
    from ropeway.compiler.driver.options import (  # noqa: PLC0415
        MAX_NUM_BATCHED_TOKENS,
        check_options,
    )

    child = take_started()
    if child is not None:  # it would wait through all of the compiling
        child.kill()
        child.wait()
    began = time.monotonic()
    tokens = max(budget or 0, MAX_NUM_BATCHED_TOKENS)
    artifact, now = cached_artifact(model, check_options("cpu", dtype, None, None, tokens))
    if now:
        seconds = time.monotonic() - began
        print(f"{model}: compiled in {seconds:.1f} s, kept as {artifact}", file=sys.stderr)
        bound.close()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return artifact


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host {host!r}: isn't an address or a name: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()  # a second server on the same port finds out now
    except OSError as error:
        bound.close()
        advice = "choose another --port, 0 for a free one"
        if error.errno != errno.EADDRINUSE:
            advice = "choose another --host or --port"
        raise InputError(f"{host}:{port}: {error.strerror}: {advice}") from error
    return bound


def _keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    keys = list(given)
    if file is not None:
        lines = [line.strip() for line in _read(file, "--api-key-file").splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise InputError(f"--api-key-file {file}: holds no key: write one a line")
        keys += found
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise InputError("--api-key: a key is ASCII text without spaces, not empty")
    return tuple(keys)


def _read(file: Path, option: str) -> str:
    try:
        return file.read_text("utf-8")
    except OSError as error:
        raise InputError(f"{option} {file}: can't be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or no name of a file
        raise InputError(f"{option} {file}: can't be read as text: {error}") from error


def parse_size(option: str, text: str) -> int:
    """Bytes: a number alone, or with k, M, G, T (decimal) or Ki, Mi, Gi, Ti (binary) and B."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InputError(f"{option} {text!r}: isn't a size such as 512MiB, 2GiB or 1000000")
    unit = found["unit"].lower()
    base = 1024 if unit.endswith("i") else 1000
    return int(float(found["number"]) * base ** _UNITS[unit.removesuffix("i")])

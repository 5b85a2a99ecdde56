"""The `ropeway` command: finds the sub command, runs it, and turns errors into one line each.

Contract: a sub command's module is imported only when it runs, so `ropeway --help` is fast. Exit
codes: 0 done, 1 a run that failed, 2 bad input, 130 interrupted; errors are one line on stderr that
says what, where and the next step. With ROPEWAY_DEBUG set, the traceback comes first.
"""

import errno
import importlib
import io
import os
import sys
import traceback
from typing import NamedTuple

from ropeway.compiler.errors import RopewayError, RunError
from ropeway.compiler.extras import explain_missing


class Command(NamedTuple):
    """A sub command: where its function is, and the line about it in the overview.

    `panels`: it has so many options that its help shows them in groups (their rich_help_panel).
    `ahead`, MODULE:FUNCTION, is called before typer is imported, which takes as long as a start of
    Python, and before the arguments are parsed: for what takes time and needs neither.
    `service`: it has no result to print, so its standard streams may be closed.
    """

    module: str
    function: str
    summary: str
    panels: bool = False
    ahead: str = ""
    service: bool = False


COMMANDS = {
    "compile": Command("compile", "compile_model", "Compile a model into an artifact."),
    "inspect": Command("inspect", "inspect", "Show what an artifact holds and what it needs."),
    "generate": Command("generate", "generate", "Continue a prompt with an artifact."),
    "chat": Command("chat", "chat", "Talk to an artifact."),
    "serve": Command(
        "serve",
        "serve",
        "Serve a model to OpenAI clients.",
        panels=True,
        ahead="ropeway.serving.process.prestart:start_ahead",
        service=True,
    ),
    "opt": Command("opt", "opt", "Run passes on IR text."),
    "bench": Command("bench", "bench", "Measure speed against the machine's bound."),
    "bench serve": Command("bench_serve", "bench_serve", "Put load on an OpenAI server."),
}


def run() -> None:
    """The console script: run on the process's arguments and exit."""
    name, _ = _split(sys.argv[1:])
    if name in COMMANDS and COMMANDS[name].service:
        _open_missing_streams()
    elif sys.stdout is None:
        sys.exit("ropeway: error: there is no standard output to write to: it is closed")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an answer may hold any character
    sys.exit(main(sys.argv[1:]))


def _open_missing_streams() -> None:
    """What is closed becomes /dev/null, lest a socket gets its number and reads what is printed."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 -- for the process's life
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def main(arguments: list[str]) -> int:
    """Run one command line, without the program's name; returns the exit code."""
    name, rest = _split(arguments)
    label = f"ropeway {name}" if name else "ropeway"
    try:
        code = _run(name, rest)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno == errno.ENOSPC:
            _drop_output()
            error = RunError(f"standard output: {error.strerror}: the result isn't whole")
        explained = _explain(label, error)
        if explained is None:
            raise
        if os.environ.get("ROPEWAY_DEBUG"):
            traceback.print_exc()
        print(f"{label}: error: {' '.join(explained[0].split())}", file=sys.stderr)
        return explained[1]


def _run(name: str, rest: list[str]) -> int:
    entry = COMMANDS.get(name)
    if entry is not None and entry.ahead and not {"-h", "--help"} & set(rest):
        module, _, function = entry.ahead.partition(":")
        getattr(importlib.import_module(module), function)()
    from ropeway.compiler.cli.parsing import run_command, run_overview  # noqa: PLC0415

    if entry is None:
        return run_overview(COMMANDS, rest)
    return run_command(name, entry, rest)


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """The command that a line begins with, "" for none, and the rest: two words go before one."""
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return name, arguments[words:]
    return "", arguments


def _drop_output() -> None:
    """Python would complain once more when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explain(label: str, error: Exception) -> tuple[str, int] | None:
    """The message and exit code of an error that a user can do something about."""
    if isinstance(error, ModuleNotFoundError):
        error = explain_missing(label, error) or error
    if isinstance(error, RopewayError):
        return str(error), error.exit_code
    return None

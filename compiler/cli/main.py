"""The `ropeway` command: finds the sub command, runs it, and turns errors into one line each.

Contract: a sub command's module is imported only when it runs, so `ropeway --help` is fast. Exit
codes: 0 done, 1 a run that failed, 2 bad input, 130 interrupted; errors are one line on stderr that
says what, where and the next step. With ROPEWAY_DEBUG set, the traceback comes first.
"""

import errno
import importlib
import inspect
import io
import os
import sys
import traceback
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ropeway.compiler.errors import RopewayError, RunError
from ropeway.compiler.extras import explain_missing
from ropeway.compiler.version import VERSION


@dataclass(frozen=True)
class Command:
    """A sub command: where its function is, and the line about it in the overview.

    `panels`: it has so many options that its help shows them in groups (their rich_help_panel).
    """

    module: str
    function: str
    summary: str
    panels: bool = False


COMMANDS = {
    "compile": Command("compile", "compile_model", "Compile a model into an artifact."),
    "inspect": Command("inspect", "inspect", "Show what an artifact holds and what it needs."),
    "generate": Command("generate", "generate", "Continue a prompt with an artifact."),
    "chat": Command("chat", "chat", "Talk to an artifact."),
    "serve": Command("serve", "serve", "Serve a model to OpenAI clients.", panels=True),
    "opt": Command("opt", "opt", "Run passes on IR text."),
    "bench": Command("bench", "bench", "Measure speed against the machine's bound."),
    "bench serve": Command("bench_serve", "bench_serve", "Put load on an OpenAI server."),
}

# A paragraph that begins with \b is printed as it is; others are wrapped, even within an option.
EXAMPLES = """\b
Examples:
  ropeway compile SmolLM2-135M-Instruct.Q4_1.gguf -o smollm2.rope
  ropeway inspect smollm2.rope
  ropeway generate smollm2.rope "The capital of France is" --max-tokens 32
  ropeway chat smollm2.rope"""
_VERSION_HELP = "Print the version and exit."

# Typer exports this one usage error and not its base, which all usage errors share.
_USAGE_ERROR: Any = typer.BadParameter.__base__


def run() -> None:
    """The console script: run on the process's arguments and exit."""
    if sys.stdout is None:
        sys.exit("ropeway: error: there is no standard output to write to: it is closed")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an answer may hold any character
    sys.exit(main(sys.argv[1:]))


def main(arguments: list[str]) -> int:
    """Run one command line, without the program's name; returns the exit code."""
    name, rest = _split(arguments)
    label = f"ropeway {name}" if name else "ropeway"
    try:
        if name:
            code = _invoke(_build(name), rest, label)
        else:
            code = _invoke(_overview(), arguments or ["--help"], label)
        sys.stdout.flush()
        return code
    except (KeyboardInterrupt, typer.Abort):
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
    if isinstance(error, _USAGE_ERROR):
        return f"{error.format_message().rstrip('.')} (see `{label} --help`)", 2
    return None


def _invoke(app: typer.Typer, arguments: list[str], label: str) -> int:
    command = typer.main.get_command(app)
    result = command.main(args=arguments, prog_name=label, standalone_mode=False)
    return result if isinstance(result, int) else 0


def _new_app(panels: bool = False) -> typer.Typer:
    return typer.Typer(
        add_completion=False,
        rich_markup_mode="rich" if panels else None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _build(name: str) -> typer.Typer:
    """An app with this one command, imported now."""
    entry = COMMANDS[name]
    module = importlib.import_module(f"ropeway.compiler.cli.{entry.module}")
    function = getattr(module, entry.function)
    text = inspect.cleandoc(function.__doc__ or "").replace("Example: ", "\b\nExample:\n  ")
    app = _new_app(entry.panels)
    app.command(name, help=text)(function)
    return app


def _overview() -> typer.Typer:
    """An app that knows every command by name only: for help, --version and misspelt names."""
    app = _new_app()

    about = f"Compile a causal language model once, replay it fast.\n\n{EXAMPLES}"

    @app.callback(help=about)
    def options(
        version: Annotated[
            bool,
            typer.Option("--version", callback=_show_version, is_eager=True, help=_VERSION_HELP),
        ] = False,
    ) -> None:
        pass

    for name, entry in COMMANDS.items():
        app.command(name, help=entry.summary)(_listed_only)
    return app


def _show_version(asked: bool) -> None:
    if asked:
        print(f"ropeway {VERSION}")
        raise typer.Exit


def _listed_only() -> None:
    """Stands for a command in the overview; `main` runs the real one."""

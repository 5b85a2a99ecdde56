"""Command lines through typer: the app of one command, or of all by name.

Contract: imported once a command line is to be parsed, since typer takes its time; its errors leave
as Ropeway's.
"""

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropeway.compiler.errors import InputError
from ropeway.compiler.version import VERSION

if TYPE_CHECKING:
    from ropeway.compiler.cli.main import Command

# A paragraph that begins with \b is printed as it is; others are wrapped, even within an option.
EXAMPLES = """\b
Examples:
  ropeway compile SmolLM2-135M-Instruct.Q4_1.gguf -o smollm2.rope
  ropeway inspect smollm2.rope
  ropeway generate smollm2.rope "The capital of France is" --max-tokens 32
  ropeway chat smollm2.rope
  ropeway serve smollm2.rope"""
_VERSION_HELP = "Print the version and exit."

# Typer exports this one usage error and not its base, which all usage errors share.
_USAGE_ERROR: Any = typer.BadParameter.__base__


def run_command(name: str, entry: "Command", arguments: list[str]) -> int:
    """Parse `arguments` and run the command, imported now; returns the exit code.

    Raises InputError for a wrong command line, KeyboardInterrupt where a person gives up.
    """
    module = importlib.import_module(f"ropeway.compiler.cli.{entry.module}")
    function = getattr(module, entry.function)
    text = inspect.cleandoc(function.__doc__ or "").replace("Example: ", "\b\nExample:\n  ")
    app = _new_app(entry.panels)
    app.command(name, help=text)(function)
    return _invoke(app, arguments, f"ropeway {name}")


def run_overview(commands: "Mapping[str, Command]", arguments: list[str]) -> int:
    """As run_command, for a line that names no command: help, --version or a misspelt name."""
    return _invoke(_overview(commands), arguments or ["--help"], "ropeway")


def _invoke(app: typer.Typer, arguments: list[str], label: str) -> int:
    command = typer.main.get_command(app)
    try:
        result = command.main(args=arguments, prog_name=label, standalone_mode=False)
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except _USAGE_ERROR as error:
        message = error.format_message().rstrip(".")
        raise InputError(f"{message} (see `{label} --help`)") from error
    return result if isinstance(result, int) else 0


def _new_app(panels: bool = False) -> typer.Typer:
    return typer.Typer(
        add_completion=False,
        rich_markup_mode="rich" if panels else None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _overview(commands: "Mapping[str, Command]") -> typer.Typer:
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

    for name, entry in commands.items():
        app.command(name, help=entry.summary)(_listed_only)
    return app


def _show_version(asked: bool) -> None:
    if asked:
        print(f"ropeway {VERSION}")
        raise typer.Exit


def _listed_only() -> None:
    """Stands for a command in the overview; `run_command` runs the real one."""

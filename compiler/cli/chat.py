"""`ropeway chat`: a conversation, streamed; the prefix cache makes each turn cost only its own."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from ropeway.compiler.cli.answer import print_answer, text_tokenizer
from ropeway.compiler.errors import RequestError
from ropeway.runtime.llm import LLM
from ropeway.runtime.sampling.params import SamplingParams

_COMMAND = re.compile(r"/\w+")  # a path or a question about one goes to the model
_HELP = "/new starts over, /quit or Ctrl-D ends, Ctrl-C stops an answer"


def chat(
    artifact: Annotated[Path, typer.Argument(help="An artifact (NAME.rope).")],
    *,
    system: Annotated[str | None, typer.Option(help="Instructions for the whole talk.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens in an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Sample from this share of probability.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads; default: all cores.")] = None,
) -> None:
    """Talk to a model, turn by turn; answers go to stdout as they come, the speed to stderr.

    Reads one message a line, so it works in a pipe too. /new starts over, /quit or Ctrl-D ends.

    Example: ropeway chat smollm2.rope --system "You are brief." --temperature 0
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    opening = [{"role": "system", "content": system}] if system else []
    with LLM(artifact, num_threads=threads, max_num_seqs=1) as llm:
        text_tokenizer(llm).encode_chat([*opening, {"role": "user", "content": "hello"}])
        if sys.stdin.isatty():
            print(f"{llm.artifact.manifest.model.name}: {_HELP}", file=sys.stderr)
        _converse(llm, opening, params)


def _converse(llm: LLM, opening: list[dict[str, str]], params: SamplingParams) -> None:
    messages = list(opening)
    while (line := _read_line()) is not None:
        if line == "/quit":
            return
        if not line:
            continue
        if _COMMAND.fullmatch(line):
            if line == "/new":
                messages = list(opening)
            else:
                print(f"no command {line}: {_HELP}", file=sys.stderr)
            continue
        turn = [*messages, {"role": "user", "content": line}]
        try:
            answer = print_answer(llm, llm.tokenizer.encode_chat(turn), params)
        except RequestError as error:
            # Most likely the talk has outgrown the model; the person may go on.
            print(f"ropeway chat: {error} (/new starts over)", file=sys.stderr)
            continue
        except KeyboardInterrupt:
            print("\n(stopped)", file=sys.stderr)
            continue
        print(answer.speed(), file=sys.stderr)
        messages = [*turn, {"role": "assistant", "content": answer.text}]


def _read_line() -> str | None:
    """The next message; None at the end of input."""
    person = sys.stdin.isatty()
    try:
        return input("> " if person else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not person:
            raise
        print("\n(/quit or Ctrl-D ends)", file=sys.stderr)
        return ""

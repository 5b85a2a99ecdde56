"""`ropeway generate`: continue a prompt, or answer one question."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ropeway.compiler.cli.answer import print_answer, text_tokenizer
from ropeway.compiler.errors import InputError
from ropeway.runtime.llm import LLM
from ropeway.runtime.sampling.params import SamplingParams


def generate(
    artifact: Annotated[Path, typer.Argument(help="An artifact (NAME.rope).")],
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    *,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from this share of probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from so many tokens; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given again.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a question: use the chat template.")
    ] = False,
    threads: Annotated[int | None, typer.Option(help="Threads; default: all cores.")] = None,
) -> None:
    """Continue a prompt; the text goes to stdout as it comes, the speed to stderr.

    Takes the likeliest token unless told otherwise; in Python, SamplingParams() samples at
    temperature 1 and stops after 16 tokens.

    Example: ropeway generate smollm2.rope "The capital of France is" --max-tokens 32
    """
    # `echo text |` ends its line for the pipe's sake; the model would see a token of it.
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not text:
        raise InputError("the prompt is empty: give a text, or - and a text on standard input")
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or None,
    )
    with LLM(artifact, num_threads=threads, max_num_seqs=1) as llm:
        tokenizer = text_tokenizer(llm)
        if chat:
            ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        else:
            ids = tokenizer.encode(text)
        answer = print_answer(llm, ids, params)
    print(answer.speed(), file=sys.stderr)

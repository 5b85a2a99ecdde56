"""One request in two ways: as a body for the server, and offline. Both give the same `Answer`.

Knows bodies of /v1/completions and /v1/chat/completions, and nothing of how they are served.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ropeway import LLM, SamplingParams, StructuredOutputs
from ropeway.runtime.outputs import CompletionOutput, Logprobs, RequestOutput
from support.chunk_grammar import StreamedChoice, read_stream

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"

_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "allowed_token_ids",
)

Scores = list[tuple[float, dict[str, float]]]


@dataclass(frozen=True)
class Choice:
    """What a caller can see of one; `token_ids` and `scores` are None where not asked for."""

    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    scores: Scores | None  # a token's logprob, and those of its alternatives by "token_id:N"


@dataclass(frozen=True)
class Answer:
    """All choices, and the usage without what the prefix cache saved."""

    choices: list[Choice]
    prompt_tokens: int
    completion_tokens: int


# -- offline ---------------------------------------------------------------------------------


def offline_answers(llm: LLM, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[Answer]:
    """The answers to (path, body) of all requests, generated together."""
    prompts: list[Any] = []
    params: list[SamplingParams] = []
    sizes: list[int] = []
    for path, body in requests:
        own = _prompts(llm, path, body)
        prompts += own
        params += [_params(llm, path, body, len(one)) for one in own]
        sizes.append(len(own))
    outputs = iter(llm.generate(prompts, params, use_tqdm=False))
    return [
        _offline(llm, path, body, [next(outputs) for _ in range(size)])
        for (path, body), size in zip(requests, sizes, strict=True)
    ]


def _prompts(llm: LLM, path: str, body: dict[str, Any]) -> list[list[int]]:
    if path == CHAT:
        return [list(llm.tokenizer.encode_chat(body["messages"]))]
    prompt = body["prompt"]
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return [
        list(llm.tokenizer.encode(one)) if isinstance(one, str) else one
        for one in (prompt if several else [prompt])
    ]


def _params(llm: LLM, path: str, body: dict[str, Any], prompt_tokens: int) -> SamplingParams:
    own: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    if path == CHAT:
        room = llm.max_model_len - prompt_tokens
        own["max_tokens"] = body.get("max_completion_tokens", body.get("max_tokens", room))
        own["logprobs"] = body.get("top_logprobs", 0) if body.get("logprobs") else None
    else:
        own["max_tokens"] = body.get("max_tokens", 16)
        own["logprobs"] = body.get("logprobs")
    if "logit_bias" in body:
        own["logit_bias"] = {int(token): value for token, value in body["logit_bias"].items()}
    if "structured_outputs" in body:
        own["structured_outputs"] = StructuredOutputs(**body["structured_outputs"])
    schema = body.get("response_format", {}).get("json_schema")
    if schema is not None:
        own["structured_outputs"] = StructuredOutputs(json=schema["schema"])
    return SamplingParams(**own)


def _offline(llm: LLM, path: str, body: dict[str, Any], outputs: Sequence[RequestOutput]) -> Answer:
    choices = []
    for output in outputs:
        echo = ""
        if body.get("echo"):
            given = body["prompt"]
            echo = given if isinstance(given, str) else llm.tokenizer.decode(given)
        choices += [_offline_choice(path, body, one, echo) for one in output.outputs]
    return Answer(
        choices,
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(one.token_ids) for output in outputs for one in output.outputs),
    )


def _offline_choice(path: str, body: dict[str, Any], one: CompletionOutput, echo: str) -> Choice:
    scores: Scores | None = None
    if one.logprobs is not None:
        scores = [
            (entry[token].logprob, _top(path, body, entry))
            for token, entry in zip(one.token_ids, one.logprobs, strict=True)
        ]
    ids = one.token_ids if body.get("return_token_ids") else None
    return Choice(echo + one.text, one.finish_reason, one.stop_reason, ids, scores)


def _top(path: str, body: dict[str, Any], entry: Logprobs) -> dict[str, float]:
    """A completion lists the drawn token among the alternatives, a chat only the likeliest."""
    most = len(entry) if path == TEXT else body.get("top_logprobs", 0)
    return {
        f"token_id:{token}": value.logprob
        for token, value in entry.items()
        if path == TEXT or value.rank <= most
    }


# -- served ----------------------------------------------------------------------------------


def served_answer(path: str, body: dict[str, Any], content: bytes, choices: int) -> Answer:
    """The same of what a server sent, whole or streamed, for a request of so many choices.

    Raises GrammarError for a stream that isn't one.
    """
    if body.get("stream"):
        return _streamed(path, body, content, choices)
    whole = json.loads(content)
    assert "error" not in whole, whole
    assert [one["index"] for one in whole["choices"]] == list(range(choices)), whole
    usage = whole["usage"]
    return Answer(
        [_whole_choice(path, body, one) for one in whole["choices"]],
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def _whole_choice(path: str, body: dict[str, Any], one: dict[str, Any]) -> Choice:
    text = one["message"]["content"] if path == CHAT else one["text"]
    logprobs = one.get("logprobs")
    if logprobs:
        logprobs = logprobs["content"] if path == CHAT else [logprobs]
    return Choice(
        text,
        one["finish_reason"],
        one.get("stop_reason"),
        one["token_ids"] if body.get("return_token_ids") else None,
        _scores(path, body, logprobs),
    )


def _streamed(path: str, body: dict[str, Any], content: bytes, choices: int) -> Answer:
    wants_usage = bool(body.get("stream_options", {}).get("include_usage"))
    made = read_stream(content, chat=path == CHAT, n=choices, include_usage=wants_usage)
    usage = made.usage or {"prompt_tokens": -1, "completion_tokens": -1}
    return Answer(
        [_streamed_choice(path, body, made.choices[k]) for k in range(choices)],
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def _streamed_choice(path: str, body: dict[str, Any], one: StreamedChoice) -> Choice:
    return Choice(
        one.text,
        one.finish_reason,
        one.stop_reason,
        one.token_ids if body.get("return_token_ids") else None,
        _scores(path, body, one.logprobs),
    )


def _scores(path: str, body: dict[str, Any], parts: Any) -> Scores | None:
    if not body.get("logprobs") and body.get("logprobs") != 0:
        return None
    if path == CHAT:
        if body["logprobs"] is False:
            return None
        return [
            (entry["logprob"], {top["token"]: top["logprob"] for top in entry["top_logprobs"]})
            for entry in parts
        ]
    return [
        (logprob, top)
        for part in parts
        for logprob, top in zip(part["token_logprobs"], part["top_logprobs"], strict=True)
    ]


def differences(expected: Answer, found: Answer) -> list[str]:
    """What differs, a line each; a stream that said no usage is none."""
    lines = []
    for k, (right, own) in enumerate(zip(expected.choices, found.choices, strict=True)):
        for name in ("text", "finish_reason", "stop_reason", "token_ids", "scores"):
            if getattr(right, name) != getattr(own, name):
                lines.append(
                    f"choice {k}, {name}: {getattr(own, name)!r}, offline {getattr(right, name)!r}"
                )
    for name in ("prompt_tokens", "completion_tokens"):
        if getattr(found, name) not in (-1, getattr(expected, name)):
            lines.append(f"{name}: {getattr(found, name)}, offline {getattr(expected, name)}")
    return lines

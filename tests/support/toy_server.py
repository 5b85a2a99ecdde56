"""The HTTP endpoints over an engine in this process: real requests, engine core and text, a toy
model, and no sockets.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from ropeway.runtime.assembly import Assembly
from ropeway.runtime.llm import LLM
from ropeway.runtime.outputs import CompletionDelta, RequestOutput
from ropeway.runtime.text.tokenizer import Tokenizer
from ropeway.serving.errors import ApiError
from ropeway.serving.http.app import build_app
from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.endpoint import Endpoint
from ropeway.serving.http.log import Log
from ropeway.serving.process.generation import Submission
from ropeway.serving.settings import ServerSettings

MODEL = "toy"


class ToyInfo:
    """The part of EngineInfo that the endpoints look at."""

    def __init__(self, llm: LLM) -> None:
        self.max_model_len = llm.max_model_len
        self.vocab_size = llm.vocab_size
        self.eos_ids = llm._engine.core.eos_ids


class ToyGeneration:
    """A Generation whose waiter drives the engine: `steps` of it for each news."""

    def __init__(self, llm: LLM, assembly: Assembly, steps: int, fail_after: int | None) -> None:
        self._llm = llm
        self._assembly = assembly
        self._steps = steps
        self._fail_after = fail_after
        self.request_id = assembly.request.request_id
        self.aborted = False

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return self._assembly.request.prompt

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, once there is news."""
        return self._assembly.output().num_cached_tokens

    def so_far(self) -> RequestOutput:
        """What has come up to now."""
        return self._assembly.output()

    async def news(self) -> list[CompletionDelta]:
        """Everything of a few steps, as one delta a choice."""
        assembly = self._assembly
        assert assembly.deltas is not None
        steps = 0
        while not assembly.finished and (steps < self._steps or not assembly.deltas):
            await asyncio.sleep(0)
            self._step()
            steps += 1
        deltas = list(assembly.deltas)
        assembly.deltas.clear()
        return merged(deltas)

    async def output(self) -> RequestOutput:
        """Runs to the end."""
        while not self._assembly.finished:
            await asyncio.sleep(0)
            self._step()
        return self._assembly.output()

    def _step(self) -> None:
        if self._fail_after is not None:
            if self._fail_after <= 0:
                raise ApiError(500, "the engine is gone", kind="server_error")
            self._fail_after -= 1
        self._llm._advance()

    def abort(self) -> None:
        """Ends what isn't finished."""
        self.aborted = self.aborted or not self._assembly.finished
        self._llm._drop([self._assembly])

    async def __aenter__(self) -> "ToyGeneration":
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.abort()


def merged(deltas: Sequence[CompletionDelta]) -> list[CompletionDelta]:
    """One delta a choice, in the order of their first."""
    by_choice: dict[int, list[CompletionDelta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.index, []).append(delta)
    return [
        CompletionDelta(
            request_id=many[0].request_id,
            index=index,
            text="".join(one.text for one in many),
            token_ids=[token for one in many for token in one.token_ids],
            logprobs=None
            if many[0].logprobs is None
            else [entry for one in many for entry in one.logprobs or []],
            finish_reason=many[-1].finish_reason,
            stop_reason=many[-1].stop_reason,
        )
        for index, many in by_choice.items()
    ]


class ToyClient:
    """An EngineClient over an LLM of this process."""

    trouble: str | None = None
    state = "ready"

    def __init__(self, llm: LLM, *, steps: int = 1, fail_after: int | None = None) -> None:
        self.llm = llm
        self.info = ToyInfo(llm)
        self.steps = steps
        self.fail_after = fail_after
        self.generations: list[ToyGeneration] = []

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The LLM's."""
        return self.llm._engine.tokenizer

    async def in_thread(self, fn: Callable[..., Any], *args: Any) -> Any:
        """At once."""
        return fn(*args)

    async def submit(
        self, submissions: Sequence[Submission], *, streaming: bool
    ) -> list[ToyGeneration]:
        """Queues all or none."""
        made = []
        for one in submissions:
            [assembly] = self.llm._queue(
                [one.prompt_ids], [one.params], [one.priority], one.salt, streaming=streaming
            )
            made.append(ToyGeneration(self.llm, assembly, self.steps, self.fail_after))
        self.generations += made
        return made


@asynccontextmanager
async def toy_http(
    client: ToyClient, endpoints: Sequence[Endpoint], **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the endpoints."""
    context = ServerContext(
        client=client,  # type: ignore[arg-type]
        settings=ServerSettings(**settings),
        metrics=None,  # type: ignore[arg-type]
        log=Log(),
        model_names=(MODEL,),
    )
    transport = httpx.ASGITransport(build_app(context, endpoints))
    async with httpx.AsyncClient(transport=transport, base_url="http://toy/v1") as http:
        yield http


def events_of(text: str) -> list[Any]:
    """The data of a stream's events: JSON values, and "[DONE]" as text."""
    events = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    assert text.endswith("\n\n"), "an event isn't closed"
    return events

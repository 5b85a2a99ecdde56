"""The HTTP endpoints over an engine in this process: real requests, engine core and text, a toy
model, and no sockets.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from ropeway.compiler.config import Bucket
from ropeway.runtime.assembly import Assembly
from ropeway.runtime.devices.base import Handle, StepInputs
from ropeway.runtime.llm import LLM
from ropeway.runtime.outputs import CompletionDelta, RequestOutput
from ropeway.runtime.text.tokenizer import Tokenizer
from ropeway.serving.errors import ApiError
from ropeway.serving.http.app import build_app
from ropeway.serving.http.context import ServerContext
from ropeway.serving.http.endpoint import Endpoint
from ropeway.serving.http.log import Log
from ropeway.serving.openai.endpoints import ENDPOINTS
from ropeway.serving.process.generation import Submission, join_deltas
from ropeway.serving.settings import ServerSettings
from support.chunk_grammar import Streamed, read_stream
from support.tiny_tokenizers import byte_level
from support.toy_device import ToyDevice
from support.toy_llm import toy_llm

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
        return join_deltas(deltas)

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
        settings=ServerSettings(served_model_name=(MODEL,), **settings),
        metrics=None,  # type: ignore[arg-type]
        log=Log(),
    )
    transport = httpx.ASGITransport(build_app(context, endpoints))
    async with httpx.AsyncClient(transport=transport, base_url="http://toy/v1") as http:
        yield http


class ScriptedDevice(ToyDevice):
    """Whatever the prompt, `script` follows: for one request at a time, without prefix cache."""

    def __init__(self, script: Sequence[int], vocab: int) -> None:
        super().__init__(vocab=vocab)
        self._script = list(script)
        self._origin = 0

    def submit(self, bucket: Bucket, inputs: StepInputs) -> Handle:
        """The toy's step, with the logits replaced."""
        handle = super().submit(bucket, inputs)
        if len(inputs.rows) and inputs.counts[0] > 1:
            self._origin = int(inputs.positions[inputs.rows[0]])  # the prompt's last token
        for row, logits in zip(inputs.rows, handle.logits, strict=True):
            logits[:] = 0.0
            logits[self._script[int(inputs.positions[row]) - self._origin]] = 50.0
        return handle


def scripted_server(
    text: str, *, steps: int = 1, tokenizer: Tokenizer | None = None, **settings: Any
) -> "ToyServer":
    """A server whose model always says `text`."""
    tokenizer = tokenizer or byte_level()
    script = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
    llm = toy_llm(
        tokenizer=tokenizer,
        eos_ids=tokenizer.eos_ids,
        max_model_len=1024,
        blocks=400,
        caching=False,
        device=ScriptedDevice(script, tokenizer.vocab_size),
    )
    return ToyServer(ToyClient(llm, steps=steps), **settings)


class ToyServer:
    """The endpoints over a toy, one request at a time, for tests that don't care about loops."""

    def __init__(self, client: ToyClient, **settings: Any) -> None:
        self.client = client
        self._settings = settings

    @property
    def vocab(self) -> int:
        """How many token ids there are."""
        return self.client.info.vocab_size

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The answer to `body` as JSON."""

        async def ask() -> httpx.Response:
            async with toy_http(self.client, ENDPOINTS, **self._settings) as http:
                return await http.post(path, json=body)

        return asyncio.run(ask())

    def whole(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer of a request that must succeed."""
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def streamed(self, path: str, **body: Any) -> Streamed:
        """What a stream adds up to, its usage too; the grammar is checked."""
        options = {"include_usage": True, **body.pop("stream_options", {})}
        answer = self.post(path, {**body, "stream": True, "stream_options": options})
        assert answer.status_code == 200, answer.text
        prompt = body.get("prompt")
        many = isinstance(prompt, list) and not isinstance(prompt[0], int)
        return read_stream(
            answer.content,
            chat=path.startswith("/chat"),
            n=body.get("n", 1) * (len(prompt) if many and prompt else 1),
            include_usage=bool(options["include_usage"]),
            continuous_usage=bool(options.get("continuous_usage_stats")),
        )

    def refused(self, path: str, **body: Any) -> dict[str, Any]:
        """The error object of a request that must be refused with 400."""
        answer = self.post(path, body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        return dict(error)

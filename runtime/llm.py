"""LLM: a compiled program, ready to generate. The offline face of the engine.

Contract: prompts are checked whole before any of them is queued. Calls from several threads and
interleaved streams share one engine: whoever waits drives the next step, and everybody's news is
kept. A call that ends early, by error or interrupt, aborts its requests.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary, finalize

import numpy as np

from ropeway.compiler.artifact.reader import Artifact
from ropeway.compiler.errors import InputError, RequestError, RunError
from ropeway.runtime.assembly import Assembly
from ropeway.runtime.engine.messages import EngineStats, GenerationRequest
from ropeway.runtime.engine_options import EngineOptions, Verify
from ropeway.runtime.fair_lock import FairLock
from ropeway.runtime.loader import Engine, SavedProgram, load_engine
from ropeway.runtime.outputs import RequestOutput
from ropeway.runtime.progress import GenerationProgress
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.runtime.stream import CompletionStream
from ropeway.runtime.structured.grammar import Grammar
from ropeway.runtime.text.tokenizer import Tokenizer

_NEITHER = "is neither text nor a list of token ids"

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """Loads a program and generates with it. Also a context manager that closes it."""

    def __init__(
        self,
        program: str | os.PathLike[str] | SavedProgram,
        *,
        num_threads: int | None = None,
        kv_cache_memory: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        max_prefill_chunk: int | None = None,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        overlap: bool | None = None,
        verify: Verify = "fast",
    ) -> None:
        """`program`: an artifact's path, or what `ropeway.compile` or `ropeway.load` returned.

        `kv_cache_memory` is in bytes; None takes what max_num_seqs sequences of the model's full
        length need, but at most 1/8 of the available memory. `max_num_batched_tokens` and
        `max_prefill_chunk` bound a step, and one prompt's share of it; None takes the largest
        bucket. `seed` seeds requests that bring no seed. With `overlap` the next step is prepared
        while one runs; None does so where num_threads leaves a core free. Answers are the same
        bits either way. `verify="full"` checks the weights by sha256. Raises InputError
        (ArtifactError, TargetError) or RunError.
        """
        options = EngineOptions(
            num_threads=num_threads,
            kv_cache_memory=kv_cache_memory,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_chunk=max_prefill_chunk,
            enable_prefix_caching=enable_prefix_caching,
            seed=seed,
            overlap=overlap,
            verify=verify,
        )
        self._start(load_engine(program, options))

    @classmethod
    def from_engine(cls, engine: Engine) -> "LLM":
        """An LLM over an engine that was loaded otherwise."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = FairLock()
        # Weak: who waits for a request owns it. One that nobody owns any more (its caller was
        # interrupted, its stream dropped) leaves word and is aborted at the next look; the
        # collector itself may run in the middle of a step and mustn't touch the engine.
        self._assemblies: WeakValueDictionary[str, Assembly] = WeakValueDictionary()
        self._forgotten: deque[str] = deque()  # requests whose assembly is gone
        self._count = 0
        self._closed = False

    def __repr__(self) -> str:
        model = self.artifact.manifest.model
        state = "closed" if self._closed else f"{self.num_threads} threads"
        return f"<LLM {model.name}: {self.artifact.manifest.target}, {state}>"

    # -- what was loaded --------------------------------------------------------------------

    @property
    def artifact(self) -> Artifact:
        """The artifact that runs."""
        return self._engine.artifact

    @property
    def tokenizer(self) -> Tokenizer:
        """The program's tokenizer. Raises InputError when it has none."""
        if self._engine.tokenizer is None:
            raise InputError(
                f"{self.artifact.manifest.model.name} was compiled without a tokenizer: give token "
                f"ids, or compile from a checkpoint that brings one"
            )
        return self._engine.tokenizer

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to vocab_size - 1."""
        return self._engine.core.vocab_size

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and output together, that a sequence can have."""
        return self._engine.core.scheduler.max_model_len

    @property
    def num_threads(self) -> int:
        """Threads that the device computes with."""
        return self._engine.num_threads

    def stats(self) -> EngineStats:
        """Steps, host and native seconds, tokens, preemptions, prefix hits, blocks."""
        with self._lock:
            self._drop_forgotten()
            return self._engine.core.stats()

    # -- generation -------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs in the order of the prompts.

        A prompt is text or a list of token ids; `prompts` is one or a list of them, the
        parameters one for all or one each (default: SamplingParams()). Lower `priority` runs
        first. Only requests with the same `cache_salt` share cached prefixes. Progress goes to
        stderr when that is a terminal, unless `use_tqdm` is off. Raises RequestError, before
        anything runs, when a prompt or a parameter can't be served; RunError when the run fails.
        """
        texts = _as_prompts(prompts)
        params = _one_each("sampling_params", _or_default(sampling_params), len(texts))
        priorities = _one_each("priority", priority, len(texts))
        return self._finish(self._queue(texts, params, priorities, cache_salt), use_tqdm)

    def _finish(self, mine: list[Assembly], use_tqdm: bool) -> list[RequestOutput]:
        """Run until all of `mine` have ended."""
        try:
            with GenerationProgress(len(mine), enabled=use_tqdm) as progress:
                for assembly in mine:
                    while not assembly.finished:
                        self._advance()
                        progress.update(mine)
        finally:
            self._drop(mine)
        for assembly in mine:
            assembly.raise_error()
        return [assembly.output() for assembly in mine]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, through the program's chat template.

        A message is {"role": "system" | "user" | "assistant", "content": text}. Raises
        RequestError when there is no template or it refuses the messages.
        """
        if not messages:
            raise RequestError("messages", "the conversation is empty")
        single = isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        prompts = [self.tokenizer.encode_chat(one) for one in conversations]
        params = _one_each("sampling_params", _or_default(sampling_params), len(prompts))
        return self._finish(self._queue(prompts, params), use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> CompletionStream:
        """Continue one prompt and yield its news as they come; closing the iterator aborts.

        The request is checked and queued at once, before the first delta is asked for.
        """
        if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str):
            raise RequestError(
                "prompt", "is a list of texts: stream takes one, generate takes many"
            )
        params = _or_default(sampling_params)
        [assembly] = self._queue([prompt], [params], [priority], cache_salt, streaming=True)
        return CompletionStream(assembly, self._advance, self._drop)

    def abort(self, request_id: str | None = None) -> bool:
        """End one request, or all of them (None), from any thread or between two deltas.

        Their choices finish with "abort". False when nothing was running under that id.
        """
        with self._lock:
            live = list(self._assemblies) if request_id is None else [request_id]
            return any([self._engine.core.abort(one) for one in live])

    def close(self) -> None:
        """Abort what runs and release the device; a second call does nothing."""
        if self._lock.forked:
            return  # what a child inherits is its parent's to release
        with self._lock:
            if not self._closed:
                self._closed = True
                self._assemblies.clear()
                self._engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the shared engine ------------------------------------------------------------------

    def _queue(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int] | None = None,
        salt: str = "",
        *,
        streaming: bool = False,
    ) -> list[Assembly]:
        encoded = [self._encode(prompt) for prompt in prompts]
        grammars = self._compile_grammars(params)
        with self._lock:
            self._check_open()
            self._drop_forgotten()
            core = self._engine.core
            requests = [
                GenerationRequest(
                    request_id=str(self._count + index),
                    prompt=ids,
                    params=one,
                    priority=priorities[index] if priorities else 0,
                    salt=salt,
                )
                for index, (ids, one) in enumerate(zip(encoded, params, strict=True))
            ]
            for index, request in enumerate(requests):
                with _of_request(index, len(requests)):
                    core.check(request, grammars[index])
            assemblies = [
                Assembly(
                    request,
                    prompt if isinstance(prompt, str) else None,
                    self._engine.tokenizer,
                    streaming=streaming,
                )
                for prompt, request in zip(prompts, requests, strict=True)
            ]
            self._count += len(requests)  # first: an interrupted call mustn't lend its ids again
            try:
                for assembly, grammar in zip(assemblies, grammars, strict=True):
                    request_id = assembly.request.request_id
                    self._assemblies[request_id] = assembly
                    finalize(assembly, self._forgotten.append, request_id).atexit = False
                    core.add(assembly.request, grammar)
            except BaseException:
                self._drop(assemblies)
                raise
            return assemblies

    def _compile_grammars(self, params: Sequence[SamplingParams]) -> list[Grammar | None]:
        """Before the engine is locked, since it can take a while."""
        core = self._engine.core
        compiled: dict[int, Grammar | None] = {}
        for index, one in enumerate(params):
            if id(one) not in compiled:
                with _of_request(index, len(params)):
                    compiled[id(one)] = core.compile_grammar(one)
        return [compiled[id(one)] for one in params]

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise RequestError("prompt", f"{_NEITHER}, but {type(prompt).__name__}")
        given: Sequence[Any] = prompt  # ids of an array are numpy's; the core checks the rest
        return tuple(int(token) if isinstance(token, np.integer) else token for token in given)

    def _advance(self) -> None:
        """Run one step and hand everybody their news."""
        with self._lock:
            self._check_open()
            self._drop_forgotten()
            core = self._engine.core
            updates = core.step()
            began = time.perf_counter()
            for update in updates:
                assembly = self._assemblies.get(update.request_id)
                if assembly is not None and assembly.push(update):
                    core.finish_choice(update.request_id, update.choice)
            core.count_host(time.perf_counter() - began)

    def _drop(self, assemblies: Sequence[Assembly]) -> None:
        with self._lock:
            for assembly in assemblies:
                request_id = assembly.request.request_id
                self._assemblies.pop(request_id, None)
                if not assembly.finished and not self._closed:
                    self._engine.core.abort(request_id)

    def _drop_forgotten(self) -> None:
        while self._forgotten:
            request_id = self._forgotten.popleft()
            if not self._closed:
                self._engine.core.abort(request_id)

    def _check_open(self) -> None:
        if self._closed:
            raise RunError("the LLM is closed: make a new one")


@contextmanager
def _of_request(index: int, count: int) -> Iterator[None]:
    """Says which of several requests an error is about."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise RequestError(error.field, f"request {index}: {error}") from error


def _or_default(params: Any) -> Any:
    return SamplingParams() if params is None else params


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(
            "prompts",
            f"must be text, a list of token ids, or a list of either, not {type(prompts).__name__}",
        )
    if prompts and all(not isinstance(item, str | Sequence) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    for index, item in enumerate(prompts):
        if not isinstance(item, str | Sequence) or isinstance(item, bytes):
            raise RequestError("prompts", f"entry {index} {_NEITHER}, but {type(item).__name__}")
    return list(prompts)  # type: ignore[arg-type]


def _one_each(field: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise RequestError(field, f"{len(value)} of them for {count} prompts: give one, or as many")
    return list(value)

"""/v1/completions as a stream of chunks.

Grammar: for each choice chunks of text (the echoed prompt first), then one with an empty text and
the finish reason; choices interleave. Then, if asked for, a chunk with the usage and no choice;
then [DONE].
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING

from ropeway.runtime.outputs import CompletionDelta
from ropeway.serving.openai.chunks import DONE, Chunks, encode, members
from ropeway.serving.openai.completion_answer import ChoiceLogprobs, CompletionJob
from ropeway.serving.openai.generating import check_end, news_of
from ropeway.serving.openai.usage import Usage, usage_of

if TYPE_CHECKING:
    from ropeway.serving.process.generation import Generation

_OPEN = b',"logprobs":null,"finish_reason":null'


async def stream_completion(
    job: CompletionJob,
    generations: Sequence["Generation"],
    in_thread: Callable[..., Awaitable[bytes]],
) -> AsyncGenerator[bytes, None]:
    """The events of a stream; what came together is one item.

    The logprobs of an echoed prompt may be thousands: they are made `in_thread`.
    """
    apart = job.heavy and job.request.echo
    stream = _CompletionStream(job, generations)
    async with AsyncExitStack() as stack:
        for generation in generations:
            await stack.enter_async_context(generation)
        news = await stack.enter_async_context(aclosing(news_of(generations)))
        async for position, deltas in news:
            if apart:
                events = await in_thread(stream.events, position, deltas)
            else:
                events = stream.events(position, deltas)
            if events:
                yield events
        yield stream.end()


class _CompletionStream:
    """Turns deltas into chunks."""

    def __init__(self, job: CompletionJob, generations: Sequence["Generation"]) -> None:
        request = job.request
        options = request.stream_options
        self._job = job
        self._generations = generations
        self._chunks = Chunks(
            job.answer_id,
            "text_completion",
            job.created,
            job.model,
            include_usage=bool(options and options.include_usage),
            continuous=bool(options and options.continuous_usage_stats),
        )
        self._prompt_tokens = sum(len(prompt.ids) for prompt in job.prompts)
        self._output_tokens = 0
        self._begun: set[int] = set()
        self._logprobs: dict[int, ChoiceLogprobs] = {}
        # Most streams only carry text: then a choice's first chunk is like the others.
        self._plain = request.logprobs is None and not request.return_token_ids
        self._opens = bool(request.echo) or not self._plain

    def events(self, position: int, deltas: Sequence[CompletionDelta]) -> bytes:
        """The chunks of some news of one prompt's choices."""
        events: list[bytes] = []
        job, chunk = self._job, self._chunks.chunk
        for delta in deltas:
            index = position * job.n + delta.index
            reason = delta.finish_reason
            check_end(reason, delta.stop_reason)
            if self._opens and index not in self._begun:
                self._begun.add(index)
                self._begin(events, index, position)
            if not job.scores_only:
                self._output_tokens += len(delta.token_ids)
                if self._plain:
                    if delta.text:
                        text = b'"text":' + encode(delta.text) + _OPEN
                        events.append(chunk(index, text, self._usage()))
                elif delta.token_ids or delta.text:
                    events.append(chunk(index, self._detailed(index, delta), self._usage()))
            if reason is not None:
                end = members(
                    text="",
                    logprobs=None,
                    finish_reason="length" if job.scores_only else reason,
                    stop_reason=None if job.scores_only else delta.stop_reason,
                )
                events.append(chunk(index, end, self._usage()))
        return events[0] if len(events) == 1 else b"".join(events)

    def end(self) -> bytes:
        """What follows after all choices have ended."""
        if not self._chunks.include_usage:
            return DONE
        return self._chunks.last(self._counts()) + DONE

    def _begin(self, events: list[bytes], index: int, position: int) -> None:
        """A choice's first chunk, with the echoed prompt and its details."""
        job = self._job
        request = job.request
        logprobs = None
        if request.logprobs is not None:
            entries = self._generations[position].so_far().prompt_logprobs if request.echo else None
            self._logprobs[index] = job.writer(position, entries)
            logprobs = self._logprobs[index].prompt
        if not request.echo and not request.return_token_ids:
            return
        first = members(text=job.prompt_text(position), logprobs=logprobs, finish_reason=None)
        if request.return_token_ids:
            ids = list(job.prompts[position].ids)
            first += b"," + members(prompt_token_ids=ids, token_ids=[])
        events.append(self._chunks.chunk(index, first, self._usage()))

    def _detailed(self, index: int, delta: CompletionDelta) -> bytes:
        request = self._job.request
        logprobs = None
        if request.logprobs is not None:
            logprobs = self._logprobs[index].take(delta.token_ids, delta.logprobs)
        made = members(text=delta.text, logprobs=logprobs, finish_reason=None)
        if request.return_token_ids:
            made += b"," + members(token_ids=delta.token_ids)
        return made

    def _usage(self) -> Usage | None:
        return self._counts() if self._chunks.continuous else None

    def _counts(self) -> Usage:
        cached = sum(generation.cached_tokens for generation in self._generations)
        return usage_of(self._prompt_tokens, self._output_tokens, cached)

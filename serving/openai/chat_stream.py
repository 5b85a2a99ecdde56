"""/v1/chat/completions as a stream of chunks.

Grammar: for each choice a chunk with the role, then chunks of content, reasoning or calls, then one
with an empty delta and the finish reason; choices interleave. Then, if asked for, a chunk with the
usage and no choice; then [DONE].
"""

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from ropeway.runtime.outputs import CompletionDelta
from ropeway.serving.openai.chat_job import ChatJob
from ropeway.serving.openai.chunks import DONE, Chunks, encode, members
from ropeway.serving.openai.generating import check_end
from ropeway.serving.openai.logprobs import ChatLogprobs, chat_logprobs
from ropeway.serving.openai.usage import Usage, usage_of
from ropeway.serving.parsing.pieces import CallStart, Content, OutputParser, Piece, Reasoning

if TYPE_CHECKING:
    from ropeway.serving.process.generation import Generation

_ROLE = b'"delta":{"role":"assistant","content":""}'
_REST = b',"logprobs":null,"finish_reason":null'


async def stream_chat(job: ChatJob, generation: "Generation") -> AsyncGenerator[bytes, None]:
    """The events of a stream; what came together is one item."""
    stream = _ChatStream(job, generation)
    async with generation:
        while deltas := await generation.news():
            events = stream.events(deltas)
            if events:
                yield events
        if stream.chunks.include_usage:
            yield stream.chunks.last(stream.usage(stream.count_reasoning())) + DONE
        else:
            yield DONE


class _ChatStream:
    """Turns deltas into chunks."""

    def __init__(self, job: ChatJob, generation: "Generation") -> None:
        options = job.request.stream_options
        self._job = job
        self._generation = generation
        self.chunks = Chunks(
            job.answer_id,
            "chat.completion.chunk",
            job.created,
            job.model,
            include_usage=bool(options and options.include_usage),
            continuous=bool(options and options.continuous_usage_stats),
        )
        self._shows_ids = bool(job.request.return_token_ids)
        self._wants_details = bool(job.request.logprobs) or self._shows_ids
        self._output_tokens = 0
        self._parsers: list[OutputParser] = []
        self._reasoning: list[list[str]] = [[] for _ in range(job.n)]

    def events(self, deltas: Sequence[CompletionDelta]) -> bytes:
        """The chunks of some news."""
        events: list[bytes] = []
        if not self._parsers:
            self._begin(events)
        for delta in deltas:
            reason = delta.finish_reason
            check_end(reason, delta.stop_reason)
            self._output_tokens += len(delta.token_ids)
            parser = self._parsers[delta.index]
            pieces = parser.push(delta.text) if delta.text else ()
            if reason is not None:
                pieces = [*pieces, *parser.finish()]
            self._add(events, delta, pieces)
            if reason is not None:
                end = members(
                    delta={},
                    logprobs=None,
                    finish_reason=self._job.finish_reason(reason, parser),
                    stop_reason=delta.stop_reason,
                )
                events.append(self.chunks.chunk(delta.index, end, self._continuous()))
        return events[0] if len(events) == 1 else b"".join(events)

    def usage(self, reasoning: int = 0) -> Usage:
        """The counts so far."""
        return usage_of(
            len(self._job.prompt.ids),
            self._output_tokens,
            self._generation.cached_tokens,
            reasoning,
        )

    def count_reasoning(self) -> int:
        """Tokens of all choices' thinking."""
        return sum(self._job.count_reasoning("".join(texts)) for texts in self._reasoning)

    def _continuous(self) -> Usage | None:
        return self.usage() if self.chunks.continuous else None

    def _begin(self, events: list[bytes]) -> None:
        """The first chunk of every choice."""
        job = self._job
        for index in range(job.n):
            self._parsers.append(job.parser())
            first = _ROLE + _REST
            if self._shows_ids:
                first += b"," + members(prompt_token_ids=list(job.prompt.ids), token_ids=[])
            events.append(self.chunks.chunk(index, first, self._continuous()))
            if job.echo:
                echo = members(delta={"content": job.echo})
                events.append(self.chunks.chunk(index, echo + _REST, self._continuous()))

    def _add(self, events: list[bytes], delta: CompletionDelta, pieces: Sequence[Piece]) -> None:
        """A chunk for each piece. What belongs to tokens, not to text, goes with the first of them,
        or with an empty one while the parser holds the text back."""
        index = delta.index
        members_of = [made for piece in pieces if (made := self._delta(index, piece)) is not None]
        rest = _REST
        if self._wants_details and delta.token_ids:
            rest = self._details(delta)
            members_of = members_of or [b'"delta":{}']
        for made in members_of:
            events.append(self.chunks.chunk(index, made + rest, self._continuous()))
            rest = _REST

    def _delta(self, index: int, piece: Piece) -> bytes | None:
        """A piece as the member "delta"; None for one that the caller doesn't see."""
        if isinstance(piece, Content):
            return b'"delta":{"content":' + encode(piece.text) + b"}"
        if isinstance(piece, Reasoning):
            self._reasoning[index].append(piece.text)
            if not self._job.shows_reasoning:
                return None
            text = encode(piece.text)
            return b'"delta":{"reasoning_content":' + text + b',"reasoning":' + text + b"}"
        function = (
            {"name": piece.name, "arguments": ""}
            if isinstance(piece, CallStart)
            else {"arguments": piece.text}
        )
        if self._job.use.legacy:
            return members(delta={"function_call": function}) if piece.index == 0 else None
        call: dict[str, object] = {"index": piece.index}
        if isinstance(piece, CallStart):
            call |= {"id": piece.call_id, "type": "function"}
        return members(delta={"tool_calls": [call | {"function": function}]})

    def _details(self, delta: CompletionDelta) -> bytes:
        """What follows a delta's text: logprobs, ids."""
        request = self._job.request
        logprobs = None
        if request.logprobs:
            logprobs = ChatLogprobs(
                chat_logprobs(
                    self._job.tokenizer,
                    delta.token_ids,
                    delta.logprobs or [],
                    request.top_logprobs or 0,
                    bool(request.return_tokens_as_token_ids),
                )
            )
        made = b"," + members(logprobs=logprobs, finish_reason=None)
        return made + b"," + members(token_ids=delta.token_ids) if self._shows_ids else made

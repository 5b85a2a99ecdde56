"""Several generations at once: their news as one stream, their outputs as one list."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from ropeway.runtime.outputs import CompletionDelta, RequestOutput
from ropeway.serving.errors import ApiError

if TYPE_CHECKING:
    from ropeway.serving.process.generation import Generation


async def outputs_of(generations: Sequence["Generation"]) -> list[RequestOutput]:
    """Every output, in order. Raises ApiError when one failed; the rest are then aborted."""
    async with AsyncExitStack() as stack:
        for generation in generations:
            await stack.enter_async_context(generation)
        outputs = [await generation.output() for generation in generations]
    for output in outputs:
        for choice in output.outputs:
            check_end(choice.finish_reason, choice.stop_reason)
    return outputs


async def news_of(
    generations: Sequence["Generation"],
) -> AsyncGenerator[tuple[int, list[CompletionDelta]], None]:
    """(which generation, its news) as they come, until all have ended.

    Raises ApiError when one failed. The caller closes this, and the generations.
    """
    if len(generations) == 1:
        while deltas := await generations[0].news():
            yield 0, deltas
        return
    waiting = {
        asyncio.ensure_future(generation.news()): index
        for index, generation in enumerate(generations)
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                if deltas := task.result():
                    waiting[asyncio.ensure_future(generations[index].news())] = index
                    yield index, deltas
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def check_end(finish_reason: str | None, stop_reason: int | str | None) -> None:
    """Raises ApiError for an end that isn't an answer."""
    if finish_reason == "abort":
        raise ApiError(
            503,
            "the server ended this request before it was finished: it is shutting down",
            kind="server_error",
            code="aborted",
        )
    if finish_reason == "error":
        raise ApiError(
            500, f"the generation failed: {stop_reason}", kind="server_error", code="engine_error"
        )

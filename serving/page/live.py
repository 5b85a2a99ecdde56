"""/live: what the page's live view shows, cheap enough to be asked for every second.

Contract: totals only grow while the engine lives, and `clock` is the server's, so that every reader
takes differences of its own and none disturbs another's.
"""

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ropeway.serving.errors import ApiError
from ropeway.serving.http.body import json_answer
from ropeway.serving.http.context import ServerContext


class EngineNow(msgspec.Struct, frozen=True, kw_only=True):
    """Requests and cache blocks now, and totals in tokens since the engine started."""

    running: int
    waiting: int
    blocks_used: int
    blocks_total: int
    block_size: int
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    output_tokens: int
    preemptions: int


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """The server now. `state` is what /health goes by; without a living engine `engine` is null and
    `trouble` says why. `clock` in seconds from any start; the first-token totals over requests that
    have ended, in seconds."""

    state: str
    trouble: str | None
    model: str
    clock: float
    first_tokens: int
    first_token_seconds: float
    engine: EngineNow | None


async def live(request: Request, context: ServerContext) -> Response:
    """One snapshot."""
    client, first = context.client, context.metrics.first_token
    engine = None
    trouble = client.trouble
    if client.state in ("ready", "draining"):
        try:
            stats = await client.stats()
        except ApiError as error:  # it died just now
            trouble = error.message
        else:
            engine = EngineNow(
                running=stats.running,
                waiting=stats.waiting,
                blocks_used=stats.blocks_used,
                blocks_total=stats.blocks_total,
                block_size=stats.block_size,
                prefix_queries=stats.prefix_queries,
                prefix_hits=stats.prefix_hits,
                prompt_tokens=stats.prompt_tokens,
                output_tokens=stats.output_tokens,
                preemptions=stats.preemptions,
            )
    return json_answer(
        Live(
            state=client.state,
            trouble=trouble,
            model=context.model_name,
            clock=time.monotonic(),
            first_tokens=first.count,
            first_token_seconds=first.total,
            engine=engine,
        )
    )

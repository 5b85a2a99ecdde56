"""Clients of real engine processes, for tests: started, used in one loop, ended."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ropeway.runtime.engine.messages import EngineStats
from ropeway.runtime.engine_options import EngineOptions
from ropeway.runtime.sampling.params import SamplingParams
from ropeway.serving.process.client import EngineClient
from ropeway.serving.process.generation import Generation, Submission
from ropeway.serving.process.supervisor import ENGINE_COMMAND
from ropeway.serving.settings import ServerSettings

T = TypeVar("T")
READY = 60.0  # seconds; this machine may be busy


def with_client(
    artifact: Path,
    work: Callable[[EngineClient], Awaitable[T]],
    *,
    settings: ServerSettings | None = None,
    command: Sequence[str] = ENGINE_COMMAND,
    hang_seconds: float = 120.0,
    **options: Any,
) -> T:
    """What `work` returns, given a client that is ready."""

    async def run() -> T:
        client = EngineClient(
            artifact,
            EngineOptions(**{"num_threads": 1, **options}),
            settings or ServerSettings(),
            command=command,
            hang_seconds=hang_seconds,
        )
        try:
            await client.start()
            await client.wait_ready(READY)
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


async def submit(
    client: EngineClient, prompt: Sequence[int], *, streaming: bool = True, **params: Any
) -> Generation:
    """One greedy request."""
    wanted = SamplingParams(**{"temperature": 0, **params})
    [generation] = await client.submit([Submission(prompt, wanted)], streaming=streaming)
    return generation


async def stats_when(
    client: EngineClient, wanted: Callable[[EngineStats], bool], seconds: float = 10.0
) -> EngineStats:
    """The first stats that are as `wanted`; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not wanted(stats := await client.stats()):
            await asyncio.sleep(0.005)
    return stats

"""Two thousand requests of varied shapes: memory and objects stay where they were."""

import gc
import random
from pathlib import Path

from support.tiny_checkpoint import byte_prompt

import ropeway
from ropeway.compiler.errors import RequestError

WARM, ROUNDS, BATCH = 10, 30, 50


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def varied(draw: random.Random) -> ropeway.SamplingParams:
    return ropeway.SamplingParams(
        temperature=draw.choice([0.0, 0.8]),
        n=draw.choice([1, 1, 1, 3]),
        max_tokens=draw.choice([1, 2, 38]),
        logprobs=draw.choice([None, None, 2]),
        prompt_logprobs=draw.choice([None, None, None, 1]),
        stop=draw.choice([None, "e"]),
        repetition_penalty=draw.choice([1.0, 1.2]),
        top_p=draw.choice([1.0, 0.9]),
    )


def serve(llm: ropeway.LLM, draw: random.Random) -> None:
    """50 requests: some stream, some are dropped or refused, most run as a batch."""
    prompts = [byte_prompt(draw.randrange(1, 90), draw.randrange(40)) for _ in range(BATCH - 4)]
    llm.generate(prompts, [varied(draw) for _ in prompts])
    for close in (True, False):
        stream = llm.stream(byte_prompt(draw.randrange(40, 90), 7), varied(draw))
        next(stream, None)
        if close:
            stream.close()
        del stream
    try:
        llm.generate([[1], [999]])
    except RequestError as error:
        assert error.field == "prompt"


def test_memory_is_flat_over_two_thousand_requests(artifact: Path) -> None:
    draw = random.Random(1)
    with ropeway.LLM(artifact, num_threads=1, kv_cache_memory=1 << 20) as llm:
        for _ in range(WARM):
            serve(llm, draw)
        gc.collect()
        before, objects = resident(), len(gc.get_objects())
        for _ in range(ROUNDS):
            serve(llm, draw)
        llm.stats()  # takes note of the streams that were dropped
        gc.collect()
        after, left = resident(), len(gc.get_objects())
        stats = llm.stats()
    assert stats.blocks_used == stats.running == stats.waiting == 0
    assert stats.blocks_free == stats.blocks_total
    assert stats.preemptions > 0 and stats.prefix_hits > 0
    assert after - before < 4 << 20
    assert left - objects < 300

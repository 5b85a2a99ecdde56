"""Two thousand requests of varied shapes: memory and objects stay where they were."""

import gc
import json
import os
import random
import subprocess
import sys
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


def measure(artifact: Path) -> dict[str, int | bool]:
    """What 1,500 requests left behind, after 500 to warm up."""
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
    return {
        "grown": after - before,
        "objects": left - objects,
        "idle": stats.blocks_used == stats.running == stats.waiting == 0,
        "whole": stats.blocks_free == stats.blocks_total,
        "exercised": stats.preemptions > 0 and stats.prefix_hits > 0,
    }


def test_memory_is_flat_over_two_thousand_requests(artifact: Path) -> None:
    """In a process of its own: what other tests left would hide or feign a growth."""
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, __file__, str(artifact)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tests)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["idle"] and found["whole"] and found["exercised"]
    assert found["grown"] < 4 << 20
    assert found["objects"] < 300


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))

"""OpenVINO GenAI in process: continuous batching, bf16 compute; option `kv` is the cache's type."""

import os
from itertools import count

import numpy as np
import openvino
import openvino_genai

from .serving import Settings, serve

_CACHE_GIB = 2


class OpenVino:
    """The continuous batching pipeline, stepped by hand."""

    created = None

    def __init__(self, settings: Settings) -> None:
        self.process = os.getpid()
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GIB
        scheduler.max_num_seqs = 2 * settings.requests
        scheduler.max_num_batched_tokens = 2048
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_NUM_THREADS": settings.threads,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": settings.options["kv"],
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            settings.model, scheduler, "CPU", properties
        )
        self._numbers = count()

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """See Engine."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        handles = [
            self._pipeline.add_request(
                next(self._numbers), openvino.Tensor(np.array([prompt], dtype=np.int64)), config
            )
            for prompt in prompts
        ]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    def close(self) -> None:
        """It ends with this process."""


if __name__ == "__main__":
    serve(OpenVino)

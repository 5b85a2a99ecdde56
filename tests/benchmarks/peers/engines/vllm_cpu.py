"""vLLM's CPU build in process, bf16, compiled (not eager), OpenMP threads bound to the cores."""

import os
from typing import Any

from .serving import Settings, serve


class Vllm:
    """vLLM's offline LLM class."""

    created = None

    def __init__(self, settings: Settings) -> None:
        self.process = os.getpid()
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        from vllm import LLM, SamplingParams  # noqa: PLC0415  (reads the environment)

        self._params: Any = SamplingParams
        self._llm = LLM(
            settings.model,
            dtype="bfloat16",
            max_model_len=max(2048, settings.longest),
            max_num_seqs=settings.requests,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """See Engine."""
        params = self._params(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """Its workers end with this process."""


if __name__ == "__main__":
    serve(Vllm)

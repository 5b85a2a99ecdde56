"""Ropeway itself, as its users run it; prefix caching is off so that nothing is reused."""

import os

from ropeway.runtime.llm import LLM
from ropeway.runtime.sampling.params import SamplingParams

from .serving import Settings, serve


class Ropeway:
    """A program on the cpu target."""

    created = None

    def __init__(self, settings: Settings) -> None:
        self.process = os.getpid()
        limits = {key: int(value) for key, value in settings.options.items()}
        self._llm = LLM(
            settings.model,
            num_threads=settings.threads,
            enable_prefix_caching=False,
            **limits,
        )

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """See Engine."""
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """See Engine."""
        self._llm.close()


if __name__ == "__main__":
    serve(Ropeway)

"""Hugging Face transformers in process: bf16, eager, SDPA attention, one padded batch."""

import os

import torch
from transformers import AutoModelForCausalLM

from .serving import Settings, serve


class Transformers:
    """`generate` of a model of transformers."""

    created = None

    def __init__(self, settings: Settings) -> None:
        self.process = os.getpid()
        torch.set_num_threads(settings.threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self._pad = self._model.config.pad_token_id

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """See Engine."""
        longest = max(map(len, prompts))
        missing = [longest - len(prompt) for prompt in prompts]
        padded = [[self._pad] * n + prompt for n, prompt in zip(missing, prompts, strict=True)]
        seen = [[0] * n + [1] * (longest - n) for n in missing]
        output = self._model.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(seen),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=self._pad,
        )
        return output[:, longest:].tolist()

    def close(self) -> None:
        """It ends with this process."""


if __name__ == "__main__":
    serve(Transformers)

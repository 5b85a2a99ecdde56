"""Writes the corpus entry of the current artifact format; refuses to touch one that is there.

An entry is a tiny artifact and, beside it, prompts with the ids that it must keep generating. The
ids come from transformers' own Llama in float32, not from the program under test; prompts whose
likeliest token doesn't lead clearly are left out, so any instruction set finds the same ids.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers

import ropeway
from ropeway.compiler.artifact.manifest import FORMAT
from ropeway.compiler.config import default_buckets

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from support.tiny_checkpoint import make_checkpoint  # noqa: E402

CORPUS = HERE / "corpus"
NEW_TOKENS = 12
LEAD = 0.004  # of the largest logit; float32 rounding moves logits by some 1e-6 of it
PROMPTS = ["a", "b", "Ropeways", "the cabin", "0123456789", "up the hill", "step by step", "x" * 40]


def main() -> int:
    artifact = CORPUS / f"format-{FORMAT}.rope"
    if artifact.exists():
        print(f"{artifact}: released entries stay as they are", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "tiny")
        cases = reference_cases(checkpoint)
        program = ropeway.compile(
            checkpoint, dtype="float32", buckets=default_buckets(4, 64), max_num_batched_tokens=64
        )
        program.save(artifact)
    text = json.dumps({"format": FORMAT, "cases": cases}, indent=1)
    (CORPUS / f"format-{FORMAT}.json").write_text(text + "\n")
    print(f"{artifact}: {len(cases)} prompts")
    return 0


def reference_cases(checkpoint: Path) -> list[dict[str, list[int]]]:
    """Prompt ids and greedy ids of transformers, where every step leads clearly."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    cases = []
    for prompt in PROMPTS:
        start = tokenizer(prompt)["input_ids"]
        ids = list(start)
        clear = True
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            best = logits.topk(2).values
            clear &= bool(best[0] - best[1] > LEAD * logits.abs().max())
            ids.append(int(logits.argmax()))
        if clear:
            cases.append({"prompt": start, "tokens": ids[len(start) :]})
    return cases


if __name__ == "__main__":
    sys.exit(main())

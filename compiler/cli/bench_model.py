"""The model of `ropeway bench --long-context`: SmolLM2-135M's shape with random weights.

Speed doesn't depend on what weights say, and this needs no download and has no length of its own.
Compiled in a process of its own, so that torch is not loaded beside the engine that is measured.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from ropeway.compiler.errors import RunError
from ropeway.compiler.extras import require

_SHAPE = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def compile_random(path: Path, max_model_len: int, layers: int | None = None) -> None:
    """Writes the artifact, `layers` deep (None: as deep as SmolLM2-135M).

    Raises MissingExtraError without the compile extra, RunError when compiling fails.
    """
    require("ropeway bench --long-context", "torch", "sympy", "safetensors")
    command = [sys.executable, "-m", "ropeway.compiler.cli.bench_model", str(path)]
    command += ["--max-model-len", str(max_model_len)]
    command += [] if layers is None else ["--layers", str(layers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RunError(f"compiling the model of random weights failed: {last}")


def main() -> None:
    """The process that compiles."""
    parser = argparse.ArgumentParser(prog="ropeway.compiler.cli.bench_model")
    parser.add_argument("path")
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--layers", type=int, default=_SHAPE["num_hidden_layers"])
    arguments = parser.parse_args()
    import torch  # noqa: PLC0415  (only the child's)

    from ropeway.compiler.driver.compile import compile  # noqa: PLC0415
    from ropeway.models.llama import LlamaForCausalLM  # noqa: PLC0415

    config = {
        **_SHAPE,
        "num_hidden_layers": arguments.layers,
        "max_position_embeddings": arguments.max_model_len,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaForCausalLM.read(config)).eval()
    with torch.no_grad():  # as small as trained ones: logits of a sensible size
        model.model.embed_tokens.weight.mul_(0.02)
    compile(model, max_model_len=arguments.max_model_len).save(arguments.path)


if __name__ == "__main__":
    main()

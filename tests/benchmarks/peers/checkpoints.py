"""The one model in the form that each peer reads, made from the project's GGUF file.

All hold the same weights: the file's 4-bit values dequantized, then rounded to bf16. A form is made
beside its place and moved there whole.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from .errors import EngineError


class Checkpoints:
    """Makes each form once, below a folder."""

    def __init__(self, gguf: Path, root: Path, note: Callable[[str], None]) -> None:
        self._gguf = gguf
        self._root = root
        self._note = note

    def hugging_face(self) -> Path:
        """A Hugging Face directory: bf16 safetensors, config, tokenizer."""
        return self._made("hugging_face", lambda path: write_hugging_face(self._gguf, path))

    def bf16_gguf(self, binaries: Path) -> Path:
        """A GGUF file of bf16 tensors; `binaries` is llama.cpp's folder of programs."""
        return self._made(
            "bf16.gguf",
            lambda path: self._run(
                [
                    *(str(binaries / "llama-quantize"), "--allow-requantize", "--pure"),
                    *(str(self._gguf), str(path), "BF16"),
                ],
            ),
        )

    def openvino(self, environment: Path) -> Path:
        """OpenVINO's IR with 16-bit weights; `environment` is the one that optimum is in."""
        source = self.hugging_face()
        return self._made(
            "openvino",
            lambda path: self._run(
                [
                    *(str(environment / "bin" / "optimum-cli"), "export", "openvino"),
                    *("--model", str(source), "--task", "text-generation-with-past"),
                    *("--weight-format", "fp16", str(path)),
                ],
            ),
        )

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        place, staged = self._root / name, self._root / f"new.{name}"
        if place.exists() and place.stat().st_mtime >= self._gguf.stat().st_mtime:
            return place
        self._note(f"making {place}")
        self._root.mkdir(parents=True, exist_ok=True)
        for old in (place, staged):
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        make(staged)
        staged.rename(place)
        os.utime(place)
        return place

    def _run(self, command: list[str]) -> None:
        log = self._root / f"{Path(command[0]).name}.log"
        with log.open("w") as output:
            done = subprocess.run(
                command,
                stdout=output,
                stderr=output,
                check=False,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )
        if done.returncode != 0:
            last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise EngineError(f"its model wasn't made: {last[:200]} (all of it: {log})")


def write_hugging_face(gguf: Path, folder: Path) -> None:
    """Writes the GGUF file's model as a Hugging Face directory in bf16."""
    import torch  # noqa: PLC0415  (seconds, and needed once)
    from safetensors.torch import save_file  # noqa: PLC0415

    from ropeway.compiler.frontend.checkpoints.gguf_file import open_gguf  # noqa: PLC0415
    from ropeway.compiler.frontend.checkpoints.gguf_tokenizer import (  # noqa: PLC0415
        read_gguf_tokenizer,
    )

    model = open_gguf(gguf)
    tokenizer = read_gguf_tokenizer(gguf.name, model.metadata)
    if tokenizer is None:
        raise EngineError(f"{gguf.name} brings no tokenizer")
    settings = tokenizer.settings
    ids = {
        "bos_token_id": settings.bos_id,
        "eos_token_id": settings.eos_id,
        "pad_token_id": settings.pad_id,
    }
    folder.mkdir()
    tensors = {
        name: model.tensors.get(name).to(torch.bfloat16).contiguous()
        for name in model.tensors.names()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_bytes(tokenizer.tokenizer_json)
    texts = {
        "config.json": model.config
        | ids
        | {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "dtype": "bfloat16"},
        "generation_config.json": ids,
        "tokenizer_config.json": settings.special_tokens
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.config["max_position_embeddings"],
            "chat_template": settings.chat_template,
        },
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2))

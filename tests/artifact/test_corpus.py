"""Artifacts of every released format keep loading and keep generating the same ids."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ropeway
from ropeway.compiler.artifact.manifest import FORMAT

CORPUS = Path(__file__).resolve().parent / "corpus"
FORMATS = sorted(path.stem for path in CORPUS.glob("*.rope"))

SERVE = """
import json, sys
import ropeway
llm = ropeway.LLM(sys.argv[1], num_threads=1)
params = ropeway.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
llm.generate([[1, 2, 3]], params)
list(llm.stream("hello", params))
llm.chat([{"role": "user", "content": "hello"}], params)
llm.close()
heavy = ("torch", "sympy", "transformers", "gguf", "ropeway.passes", "ropeway.models",
         "ropeway.compiler.frontend", "ropeway.compiler.driver", "ropeway.compiler.pipeline")
print(json.dumps([name for name in heavy if name in sys.modules]))
"""


def test_current_format_has_an_entry() -> None:
    assert f"format-{FORMAT}" in FORMATS


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("verify", ["fast", "full"])
def test_entry_generates_what_it_must(name: str, verify: str) -> None:
    cases = json.loads((CORPUS / f"{name}.json").read_text())["cases"]
    assert cases
    with ropeway.LLM(CORPUS / f"{name}.rope", num_threads=1, verify=verify) as llm:
        params = ropeway.SamplingParams(
            temperature=0, max_tokens=len(cases[0]["tokens"]), ignore_eos=True
        )
        outputs = llm.generate([case["prompt"] for case in cases], params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [
        case["tokens"] for case in cases
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_serving_imports_no_compiler_library(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(CORPUS / f"{name}.rope")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []

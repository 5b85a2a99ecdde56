"""Ropeway: compile a causal language model once, replay it fast.

    import ropeway

    program = ropeway.compile("SmolLM2-135M-Instruct.Q4_1.gguf")
    program.save("smollm2.rope")
    llm = ropeway.LLM("smollm2.rope")
    outputs = llm.generate("The capital of France is", ropeway.SamplingParams(temperature=0))

Every name loads on first use, so `import ropeway` is fast and a server needs no compiler library.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ropeway.compiler import errors as errors
    from ropeway.compiler.config import Bucket as Bucket
    from ropeway.compiler.driver.compile import compile as compile
    from ropeway.compiler.driver.program import Program as Program
    from ropeway.compiler.driver.program import load as load
    from ropeway.compiler.pipeline.pipeline import Pipeline as Pipeline
    from ropeway.compiler.version import VERSION as __version__  # noqa: N811
    from ropeway.runtime.llm import LLM as LLM
    from ropeway.runtime.outputs import CompletionDelta as CompletionDelta
    from ropeway.runtime.outputs import CompletionOutput as CompletionOutput
    from ropeway.runtime.outputs import Logprob as Logprob
    from ropeway.runtime.outputs import RequestOutput as RequestOutput
    from ropeway.runtime.sampling.params import SamplingParams as SamplingParams
    from ropeway.runtime.sampling.structured import StructuredOutputs as StructuredOutputs

# Public name -> (module, attribute; None for the module itself).
_EXPORTS: dict[str, tuple[str, str | None]] = {
    "Bucket": ("ropeway.compiler.config", "Bucket"),
    "CompletionDelta": ("ropeway.runtime.outputs", "CompletionDelta"),
    "CompletionOutput": ("ropeway.runtime.outputs", "CompletionOutput"),
    "LLM": ("ropeway.runtime.llm", "LLM"),
    "Logprob": ("ropeway.runtime.outputs", "Logprob"),
    "Pipeline": ("ropeway.compiler.pipeline.pipeline", "Pipeline"),
    "Program": ("ropeway.compiler.driver.program", "Program"),
    "RequestOutput": ("ropeway.runtime.outputs", "RequestOutput"),
    "SamplingParams": ("ropeway.runtime.sampling.params", "SamplingParams"),
    "StructuredOutputs": ("ropeway.runtime.sampling.structured", "StructuredOutputs"),
    "__version__": ("ropeway.compiler.version", "VERSION"),
    "compile": ("ropeway.compiler.driver.compile", "compile"),
    "errors": ("ropeway.compiler.errors", None),
    "load": ("ropeway.compiler.driver.program", "load"),
}

__all__ = [
    "LLM",
    "Bucket",
    "CompletionDelta",
    "CompletionOutput",
    "Logprob",
    "Pipeline",
    "Program",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
    "compile",
    "errors",
    "load",
]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'ropeway' has no attribute {name!r}")
    module_name, attribute = _EXPORTS[name]
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})

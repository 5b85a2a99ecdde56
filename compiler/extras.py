"""Which extra brings which optional dependency, and one clear line when it's missing."""

import importlib.util

from ropeway.compiler.errors import MissingExtraError

EXTRAS = {
    "torch": "compile",
    "sympy": "compile",
    "safetensors": "compile",
    "transformers": "import",
    "gguf": "import",
}
"""Top-level module -> extra."""


def require(what: str, *modules: str) -> None:
    """Raise MissingExtraError unless every module is installed; `what` is what needs them."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(what, module, EXTRAS[module])


def explain_missing(what: str, error: ModuleNotFoundError) -> MissingExtraError | None:
    """The error to raise instead, when what is missing belongs to an extra."""
    module = (error.name or "").partition(".")[0]
    return MissingExtraError(what, module, EXTRAS[module]) if module in EXTRAS else None

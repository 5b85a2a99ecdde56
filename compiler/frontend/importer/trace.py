"""torch.export of a causal language model, without its weights.

The traced copy holds fake tensors in the compiled dtype, so nothing is allocated and a module on
the meta device traces as well as a loaded one. Batch is 1, the length symbolic, attention SDPA. The
real module is left as it was; its buffers are kept for evaluating what doesn't depend on tokens.
"""

import copy
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ropeway.compiler.errors import ImportModelError
from ropeway.compiler.frontend.importer.rotary import make_opaque

# Any length >= 2 that equals no other size of the model keeps torch from specializing on it.
_EXAMPLE_LENGTH = 37
_WRAPPER = "model_"


@dataclass(frozen=True)
class TracedModel:
    """An exported graph and what its placeholders stand for.

    `parameters`: placeholder name -> parameter name in the module. `buffers`: placeholder name ->
    (name, real tensor or None where the module is on meta). `opaque`: modules called whole.
    """

    graph: fx.Graph
    ids: str
    parameters: dict[str, str]
    buffers: dict[str, tuple[str, torch.Tensor | None]]
    persistent: frozenset[str]
    length: str
    opaque: dict[str, nn.Module] = field(default_factory=dict)


class _Logits(nn.Module):
    """Calls a causal LM for its logits alone: no cache, no other outputs."""

    def __init__(self, module: nn.Module, options: dict[str, object]) -> None:
        super().__init__()
        self.model_ = module
        self.options = options

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.model_(ids, **self.options)
        if isinstance(out, torch.Tensor):
            return out
        logits = getattr(out, "logits", None)
        return logits if isinstance(logits, torch.Tensor) else out[0]


def trace(module: nn.Module, dtype: torch.dtype, max_length: int) -> TracedModel:
    """Exports `module` (ids int64[1, T] -> logits [1, T, V]) for 2 <= T <= max_length.

    Raises ImportModelError when the module can't be exported; the text says what stood in the way.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    shadow = _shadow(module, dtype, mode)
    opaque = make_opaque(module, shadow)
    _use_sdpa(shadow)
    wrapper = _Logits(shadow, _options(module)).eval()
    length = torch.export.Dim("T", min=2, max=max(max_length, _EXAMPLE_LENGTH + 1))
    with mode:
        ids = torch.empty((1, _EXAMPLE_LENGTH), dtype=torch.int64)
    try:
        with torch.no_grad(), warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")
            program = torch.export.export(
                wrapper, (ids,), dynamic_shapes=({1: length},), strict=False
            )
    except Exception as error:
        raise ImportModelError(_explain(module, error)) from error
    return _collect(program, module, opaque)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from logging a traceback of its own about an error that we explain."""

    def refuse(record: logging.LogRecord) -> bool:
        return False

    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(refuse)  # one of our own: another thread may be tracing too
    try:
        yield
    finally:
        log.removeFilter(refuse)


def _shadow(module: nn.Module, dtype: torch.dtype, mode: FakeTensorMode) -> nn.Module:
    """A copy whose parameters and buffers are fake CPU tensors; ties between them are kept."""
    memo: dict[int, object] = {}
    with mode:
        for tensor in (*module.parameters(), *module.buffers()):
            wanted = dtype if tensor.is_floating_point() else tensor.dtype
            fake = torch.empty(tensor.shape, dtype=wanted, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(fake, requires_grad=False) if is_parameter else fake
    try:
        return copy.deepcopy(module, memo).eval()
    except Exception as error:
        raise ImportModelError(
            f"{type(module).__name__} can't be copied for tracing ({_first_line(error)}): "
            "pass a plain module without hooks or open resources"
        ) from error


def _options(module: nn.Module) -> dict[str, object]:
    parameters = inspect.signature(module.forward).parameters
    return {"use_cache": False} if "use_cache" in parameters else {}


def _use_sdpa(shadow: nn.Module) -> None:
    """Switches a copy that was set to another attention to SDPA, or says that it can't be."""
    used = getattr(getattr(shadow, "config", None), "_attn_implementation", None)
    switch: Callable[[str], None] | None = getattr(shadow, "set_attn_implementation", None)
    if used in (None, "sdpa") or switch is None:
        return
    try:
        switch("sdpa")
    except Exception as error:
        raise ImportModelError(
            f"{type(shadow).__name__} uses attention {used!r} and has no SDPA form "
            f"({_first_line(error)}); only models whose attention is "
            "torch.nn.functional.scaled_dot_product_attention compile"
        ) from error


def _collect(
    program: torch.export.ExportedProgram, module: nn.Module, opaque: dict[str, nn.Module]
) -> TracedModel:
    parameters: dict[str, str] = {}
    buffers: dict[str, tuple[str, torch.Tensor | None]] = {}
    persistent = set()
    ids = ""
    real = dict(module.named_buffers(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    names = {n: first[id(p)] for n, p in module.named_parameters(remove_duplicate=False)}
    for spec in program.graph_signature.input_specs:
        name = spec.arg.name
        target = (spec.target or "").removeprefix(_WRAPPER + ".")
        if spec.kind == InputKind.PARAMETER:
            parameters[name] = names.get(target, target)
        elif spec.kind == InputKind.BUFFER:
            value = real.get(target)
            buffers[name] = (target, None if value is None or value.is_meta else value)
            if spec.persistent:
                persistent.add(name)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            buffers[name] = (target, program.constants[spec.target or ""])
        elif spec.kind == InputKind.USER_INPUT:
            ids = name
    node = next(node for node in program.graph.nodes if node.name == ids)
    symbol = str(node.meta["val"].shape[1])
    return TracedModel(
        program.graph, ids, parameters, buffers, frozenset(persistent), symbol, opaque
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torch.export puts the violated guard on the second line.
    wanted = 2 if "onstraint" in (lines or [""])[0] else 1
    return f"{type(error).__name__}: {' '.join(lines[:wanted])[:400]}"


def _explain(module: nn.Module, error: Exception) -> str:
    reason = _first_line(error).rstrip(".")
    return (
        f"{type(module).__name__} can't be traced with torch.export: {reason}. "
        "Its forward must take token ids [1, T] for any T and must not branch on tensor values"
    )

"""Find the first pass of a pipeline that breaks a module.

A pass breaks it by failing, by leaving a module that doesn't verify, or by moving the logits
further than its numerics class allows. Passes run in order, each result verified; the numerics are
then searched by halving, with the input's own logits as the reference: every prefix whose logits
agree is taken to be sound. Weights and inputs are random but fixed by `seed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ropeway.compiler.errors import RopewayError
from ropeway.compiler.ir.graph import Module
from ropeway.compiler.ops.verifier import verify
from ropeway.compiler.pipeline.base import Numerics, Pass, PassContext
from ropeway.compiler.pipeline.pipeline import Pipeline, run_pass
from ropeway.compiler.pipeline.probe import Probe
from ropeway.compiler.pipeline.spec import print_pass

LOSSY_LIMIT = 0.1
"""How far logits may move once a LOSSY pass has run, relative to the largest."""

Kind = Literal["error", "verification", "numerics"]


@dataclass(frozen=True)
class Verdict:
    """The first bad pass (None: all are sound), counted from 1, and what it did."""

    number: int | None
    spec: str = ""
    kind: Kind | None = None
    detail: str = ""
    compared: int = 0

    def __str__(self) -> str:
        if self.number is None:
            return f"no pass breaks the module (states compared: {self.compared})"
        return f"pass {self.number} ({self.spec}) is the first that breaks it, {self.kind}: " + (
            self.detail
        )


def bisect(pipeline: Pipeline, module: Module, *, tokens: int = 7, seed: int = 0) -> Verdict:
    """Run `pipeline` on `module` and name the first bad pass.

    Raises VerifyError when the input itself doesn't verify, RunError when it can't be interpreted.
    """
    verify(module)
    probe = Probe(module, tokens=tokens, seed=seed)
    states = [module]
    fault: Verdict | None = None
    for number, item in enumerate(pipeline, 1):
        state, fault = _step(item, number, states[-1])
        if fault is not None or state is None:
            break
        states.append(state)
    passes = tuple(pipeline)[: len(states) - 1]
    numeric = _search(probe, states, passes)
    if numeric.number is not None or fault is None:
        return numeric
    return fault


def _step(item: Pass, number: int, module: Module) -> tuple[Module | None, Verdict | None]:
    spec = print_pass(item)
    try:
        result = run_pass(item, module, PassContext()).module
    except Exception as error:  # a user's pass may raise anything: that is the finding
        return None, Verdict(number, spec, "error", f"{type(error).__name__}: {error}")
    try:
        verify(result)
    except RopewayError as error:
        return None, Verdict(number, spec, "verification", str(error))
    return result, None


def _search(probe: Probe, states: Sequence[Module], passes: Sequence[Pass]) -> Verdict:
    """Halve between the input, which is sound by definition, and the last state."""
    known: dict[int, str | None] = {0: None}

    def fault(at: int) -> str | None:
        if at not in known:
            known[at] = _compare(probe, states[at], passes[:at])
        return known[at]

    low, high = 0, len(states) - 1
    if fault(high) is None:
        return Verdict(None, compared=len(known) - 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fault(middle) is None else (low, middle)
    detail = fault(high) or ""
    return Verdict(high, print_pass(passes[high - 1]), "numerics", detail, len(known) - 1)


def _compare(probe: Probe, module: Module, passes: Sequence[Pass]) -> str | None:
    """What is wrong with the logits after `passes`, or None."""
    lossy = any(item.numerics is Numerics.LOSSY for item in passes)
    exact = all(item.numerics is Numerics.EXACT for item in passes)
    limit = 0.0 if exact else LOSSY_LIMIT if lossy else probe.tolerance
    try:
        error = probe.error(module)
    except Exception as failure:  # an interpreter that fails on the state is a finding too
        return f"{type(failure).__name__}: {failure}"
    if error <= limit:
        return None
    return f"logits are off by {error:.2e} of their largest value, allowed are {limit:.2e}"

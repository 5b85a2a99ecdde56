"""Decode at long contexts: prompts aren't computed, and their blocks hold numbers all the same."""

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from ropeway.compiler.artifact.reader import open_artifact
from ropeway.compiler.cli.bench_model import compile_random
from ropeway.compiler.cli.main import main
from ropeway.compiler.errors import InputError
from ropeway.runtime.bench.cost import model_cost
from ropeway.runtime.bench.long_context import (
    CASES,
    LONGEST,
    STEPS,
    LongContext,
    long_context_table,
    measure_long_context,
)
from ropeway.runtime.bench.machine import Ceilings
from ropeway.runtime.devices.base import StepInputs
from ropeway.runtime.devices.cpu.device import CpuDevice


@pytest.fixture
def ceilings(no_measuring: None) -> Ceilings:
    return Ceilings(1)


def quiet(what: str) -> None:
    """Nobody is told."""


def test_only_decode_steps_run_and_their_blocks_are_full(
    tiny_program: Path, ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    zeros: list[int] = []
    submit = CpuDevice.submit

    def watched(self: CpuDevice, bucket: object, inputs: StepInputs) -> object:
        caches = self.loaded.caches
        assert caches is not None
        if not seen:
            held = np.ctypeslib.as_array(
                (ctypes.c_uint16 * (caches.size // 2)).from_address(caches.address)
            )
            rows = held.reshape(caches.blocks, -1)[1:]
            zeros.append(int((rows == 0).sum()))
            assert len(rows) >= inputs.lengths.sum() / 32
        seen.append((len(inputs.ids), int(inputs.lengths.max())))
        result = submit(self, bucket, inputs)  # type: ignore[arg-type]
        assert np.isfinite(result.logits).all() or inputs.peak_only is not None
        return result

    monkeypatch.setattr(CpuDevice, "submit", watched)
    found = measure_long_context(tiny_program, 1, ceilings, [(1, 120)], quiet)
    assert zeros[0] < 10
    assert {tokens for tokens, _ in seen} == {1}
    assert [length for _, length in seen] == list(range(121, 121 + len(seen)))
    assert len(seen) >= STEPS
    assert len(found) == 1


def test_the_bound_counts_weights_and_what_is_read_of_the_cache(
    tiny_program: Path, ceilings: Ceilings
) -> None:
    """10 GB/s, 100 GFLOP/s; two layers, 2 key heads of 16 and 4 query heads, float32."""
    found = measure_long_context(tiny_program, 1, ceilings, [(1, 120), (2, 60)], quiet)
    cost = model_cost(open_artifact(tiny_program))
    for one, requests in zip(found, (1, 2), strict=True):
        assert one.requests == requests
        assert one.tok_s == pytest.approx(1e3 * requests / one.step_ms, rel=0.05)
        middle = one.context + 4 + STEPS // 2  # keys in the middle step, or a step or so more
        low, high = (requests * keys * 2 * 2 * 32 * 4 for keys in (middle - 2, middle + 4))
        assert low <= one.kv_mb * 1e6 <= high
        bytes_ = cost.weight_bytes + requests * middle * 2 * 2 * 32 * 4
        assert one.bound_ms == pytest.approx(1e3 * bytes_ / 10e9, rel=0.1)
        assert one.of_bound == pytest.approx(one.bound_ms / one.step_ms, abs=0.01)


def test_a_program_that_is_too_short_is_refused(tiny_program: Path, ceilings: Ceilings) -> None:
    with pytest.raises(InputError, match="holds sequences of 160 tokens"):
        measure_long_context(tiny_program, 1, ceilings, [(1, 159)], quiet)


def test_the_cases_fit_the_model() -> None:
    """Room for what is decoded, with the steps that the other prompts take at 2,048 tokens."""
    for requests, context in CASES:
        assert context + STEPS + 8 + (requests - 1) * context // 2048 <= LONGEST


def test_figures_without_a_bound_are_shown_as_such() -> None:
    shown = long_context_table([LongContext(1, 8192, 100.0, 10.0, 11.0, 269.0, 189.0, None, None)])
    assert " ".join(shown.splitlines()[-1].split()) == "1 8192 100.0 10.000 269.0 189.0 - -"


def test_without_the_compiler_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "torch" else find(name)
    )
    assert main(["bench", "--long-context"]) == 2
    assert "compile]" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_model_of_random_weights_is_compiled_and_measured(
    tmp_path: Path, ceilings: Ceilings
) -> None:
    path = tmp_path / "random.rope"
    compile_random(path, 256, layers=1)
    model = open_artifact(path).manifest.model
    assert (model.vocab_size, model.max_model_len) == (49152, 256)
    [found] = measure_long_context(path, 1, ceilings, [(2, 100)], quiet)
    layer = 960 * 576 + 576 * 576 + 2 * 1536 * 576 + 576 * 1536
    assert found.weight_mb == 2 * (layer + 49152 * 576) / 1e6
    assert found.tok_s > 0

"""The bench's own arithmetic: the workload is the published one, bounds and costs are as stated."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ropeway.compiler.artifact.reader import open_artifact
from ropeway.compiler.errors import InputError
from ropeway.runtime.bench.cost import model_cost
from ropeway.runtime.bench.quiet import Sampler, peak_memory_mib, process_age
from ropeway.runtime.bench.suite import Bounds, ModelCost, fractions, run_suite
from ropeway.runtime.bench.workload import Workload, make_workload, read_workload

WORKLOAD = Path(__file__).parents[1] / "benchmarks" / "workload.json"
SMOLLM2 = ModelCost(weight_bytes=269_000_000, decode_flops=269_000_000, prompt_flops=212_300_000)


@dataclass
class FixedCeilings:
    """A machine of known rates."""

    read_gb_s: float = 39.0
    gemm_bf16_gflop_s: float = 426.0
    samples: int = 0

    def sample(self) -> None:
        self.samples += 1


def test_the_generated_workload_is_the_published_file() -> None:
    published = read_workload(WORKLOAD)
    made = make_workload(49152)
    for name in ("gen", "single", "prefill1024", "batch8", "batch32", "server"):
        assert getattr(made, name) == getattr(published, name), name
    assert [sum(map(len, x)) for x in (made.batch8, made.batch32)] == [998, 3989]
    assert made.longest == 1026


def test_bounds_are_those_worked_out_by_hand() -> None:
    """At 39 GB/s and 426 GFLOP/s: 145, 746, 899 and 2,007 tokens a second."""
    bounds = Bounds(SMOLLM2, FixedCeilings())  # type: ignore[arg-type]
    work = make_workload(49152)
    assert 1 / bounds.step(1) == pytest.approx(145, abs=0.5)
    assert 8 * 128 / bounds.batch(work.batch8, 128) == pytest.approx(746, abs=1)
    assert 32 * 128 / bounds.batch(work.batch32, 128) == pytest.approx(899, abs=1)
    assert 1024 / bounds.prompt(1024) == pytest.approx(2007, abs=1)


def test_fractions_are_bound_over_measured() -> None:
    bounds = Bounds(SMOLLM2, FixedCeilings())  # type: ignore[arg-type]
    work = make_workload(49152)
    result: dict[str, Any] = {
        "decode_b1_tok_s": [0.5 / bounds.step(1), 0, 0],
        "ttft1024_ms": [4e3 * bounds.prompt(1024), 0, 0],
        "batch8_tok_s": [1024 / bounds.batch(work.batch8, 128), 0, 0],
        "batch32_tok_s": [4096 / (2 * bounds.batch(work.batch32, 128)), 0, 0],
    }
    assert fractions(result, work, bounds) == {
        "decode_b1": 0.5,
        "batch8": 1.0,
        "batch32": 0.5,
        "prefill1024": 0.25,
    }


def test_without_a_gemm_rate_there_are_no_fractions() -> None:
    bounds = Bounds(SMOLLM2, FixedCeilings(gemm_bf16_gflop_s=0.0))  # type: ignore[arg-type]
    assert set(fractions({}, make_workload(1000), bounds).values()) == {None}


def test_the_suite_runs_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "_wait_until_idle", lambda self: None)
    asked: list[tuple[int, int]] = []

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        asked.append((len(prompts), new))
        return [[7] * new for _ in prompts]

    ceilings = FixedCeilings()
    work = Workload(
        gen=3, single=[1], prefill1024=[1] * 9, batch8=[[1]] * 8, batch32=[[1]] * 32, server=[],
        agree=[[5], [6]],
    )  # fmt: skip
    result = run_suite(generate, work, Sampler(1, lambda what: None), ceilings, lambda what: None)  # type: ignore[arg-type]
    assert {(1, 3), (8, 3), (32, 3), (1, 24)} <= set(asked)
    assert result["agree"] == [[7] * 24] * 2
    assert ceilings.samples >= 4  # between the figures, not once
    for key in (
        "decode_b1_tok_s", "e2e_b1_tok_s", "ttft128_ms", "ttft1024_ms", "prefill1024_tok_s",
        "batch8_tok_s", "batch32_tok_s", "first_call_s", "peak_mib",
    ):  # fmt: skip
        assert key in result


@pytest.mark.parametrize("text", ["", "{}", '{"gen": 1}', "[1]", '{"gen": "x"}'])
def test_a_file_that_is_no_workload_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"w\.json"):
        read_workload(path)
    with pytest.raises(InputError, match=r"missing\.json"):
        read_workload(tmp_path / "missing.json")


def test_the_process_is_young_and_small() -> None:
    assert 0 < process_age() < 24 * 3600
    assert 10 < peak_memory_mib() < 24 * 1024


def test_workload_refuses_a_tiny_vocabulary() -> None:
    with pytest.raises(InputError, match="--workload"):
        make_workload(100)


@pytest.mark.slow
def test_a_token_of_smollm2_costs_what_its_weights_say(smollm2_bf16: Path) -> None:
    """134.5 million weights in GEMMs, 28.3 million of them the head."""
    cost = model_cost(open_artifact(smollm2_bf16))
    layer = 960 * 576 + 576 * 576 + 2 * 1536 * 576 + 576 * 1536
    head = 49152 * 576
    assert cost.weight_bytes == 2 * (30 * layer + head) == 268_959_744
    assert cost.prompt_flops == 2 * 30 * layer
    assert cost.decode_flops == cost.prompt_flops + 2 * head


def test_samples_are_json(tmp_path: Path) -> None:
    """A workload survives a round trip through its file."""
    path = tmp_path / "w.json"
    path.write_bytes(msgspec.json.encode(make_workload(300)))
    assert read_workload(path) == make_workload(300)

"""What turns the samples of several engines into a table: medians, ratios, errors, alternation."""

from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.peers import noise
from benchmarks.peers.errors import EngineError
from benchmarks.peers.figures import FIGURES, Figure
from benchmarks.peers.noise import Watch
from benchmarks.peers.rounds import Contest, Entry, Record
from benchmarks.peers.table import best_peer, ratio, render

from ropeway.runtime.bench.suite import Bounds, ModelCost
from ropeway.runtime.bench.workload import Workload

BY_KEY = {figure.key: figure for figure in FIGURES}
WORK = Workload(
    gen=5, single=[1] * 4, prefill1024=[1] * 100, batch8=[[1] * 3] * 2, batch32=[[1] * 2] * 3,
    server=[],
)  # fmt: skip
MEDIANS = {
    "ropeway": {"decode_b1_tok_s": 150.0, "ttft128_ms": 30.0},
    "slow": {"decode_b1_tok_s": 50.0, "ttft128_ms": 120.0},
    "quick": {"decode_b1_tok_s": 100.0, "ttft128_ms": 40.0},
    "broken": {},
}


class FixedCeilings:
    """A machine of 1 GB/s and 1 GFLOP/s."""

    read_gb_s = 1.0
    gemm_bf16_gflop_s = 1.0

    def __init__(self) -> None:
        self.samples = 0

    def sample(self) -> None:
        self.samples += 1


def test_the_best_peer_is_never_ours_and_least_where_less_is_better() -> None:
    assert best_peer(BY_KEY["decode_b1_tok_s"], MEDIANS) == "quick"
    assert best_peer(BY_KEY["ttft128_ms"], MEDIANS) == "quick"
    assert ratio(BY_KEY["decode_b1_tok_s"], MEDIANS) == pytest.approx(1.5)
    assert ratio(BY_KEY["ttft128_ms"], MEDIANS) == pytest.approx(0.75)


def test_without_peers_or_without_ours_there_is_no_ratio() -> None:
    decode = BY_KEY["decode_b1_tok_s"]
    assert best_peer(decode, {"ropeway": MEDIANS["ropeway"], "broken": {}}) is None
    assert ratio(decode, {"ropeway": MEDIANS["ropeway"]}) is None
    assert ratio(decode, {"quick": MEDIANS["quick"]}) is None


def test_the_table_names_a_broken_peer_and_leaves_its_cells_empty() -> None:
    text = render(MEDIANS, {"decode_b1_tok_s": 0.876}, {"broken": "FAILED: no wheel"})
    decode = next(line for line in text.splitlines() if line.startswith("| decode"))
    assert decode.split(" | ")[1:] == ["150", "50.0", "100", "-", "1.50 (quick)", "0.88 |"]
    header = text.splitlines()[0]
    assert [name in header for name in MEDIANS] == [True] * 4
    assert text.splitlines()[-1] == "broken: FAILED: no wheel"
    peak = next(line for line in text.splitlines() if line.startswith("| peak"))
    assert peak.split(" | ")[1:] == ["-", "-", "-", "-", "-", " |"]


def test_a_record_keeps_medians_and_the_worst_noise() -> None:
    record = Record()
    for value, others in ((9.0, 0.1), (1.0, 0.3), (2.0, 0.0)):
        record.add("x", value, others)
    assert record.medians() == {"x": 2.0}
    assert record.others_share_max == 0.3


def test_figures_are_what_was_timed() -> None:
    """A clock of 1 s a prompt token and 10 s a further step gives rates worked out by hand."""

    def timed(prompts: list[list[int]], new: int) -> float:
        return sum(map(len, prompts)) + 10.0 * (new - 1)

    def of(key: str) -> float:
        measure = BY_KEY[key].measure
        assert measure is not None
        return measure(timed, WORK)

    assert of("decode_b1_tok_s") == pytest.approx(0.1)
    assert of("prefill1024_tok_s") == pytest.approx(1.0)
    assert of("ttft128_ms") == pytest.approx(4000.0)
    assert of("batch8_tok_s") == pytest.approx(2 * 5 / 46)
    assert of("batch32_tok_s") == pytest.approx(3 * 5 / 46)


def test_bounds_are_in_the_figures_own_unit() -> None:
    """At 1 GB/s and 1 GFLOP/s, 1e9 bytes, 5e8 flops a step and 2.5e8 a prompt token."""
    cost = ModelCost(weight_bytes=10**9, decode_flops=5 * 10**8, prompt_flops=25 * 10**7)
    bounds = Bounds(cost, FixedCeilings())  # type: ignore[arg-type]
    found = {f.key: f.bound(bounds, WORK) for f in FIGURES if f.bound is not None}
    assert found == {
        "decode_b1_tok_s": pytest.approx(1.0),
        "batch8_tok_s": pytest.approx(10 / (6 * 0.25 + 4 * 1.0)),
        "batch32_tok_s": pytest.approx(15 / (6 * 0.25 + 4 * 1.5)),
        "prefill1024_tok_s": pytest.approx(4.0),
    }


class FakeProcess:
    """An engine that writes down what it is asked, and may fail at its n-th generation."""

    def __init__(self, name: str, journal: list[tuple[str, str]], fails_at: int = -1) -> None:
        self.session = hash(name)
        self._name, self._journal, self._left = name, journal, fails_at

    def __getattr__(self, verb: str) -> Callable[..., float]:
        def act(*_: Any) -> float:
            if verb in ("generate", "first_token"):
                self._left -= 1
                if self._left == 0:
                    raise EngineError("fell over")
            self._journal.append((self._name, verb))
            return 2.0

        return act


def contest(journal: list[tuple[str, str]], fails_at: int = -1) -> Contest:
    """Two engines, of which the second may fail."""
    entries = {
        "ropeway": Entry(lambda: FakeProcess("ropeway", journal), {}),  # type: ignore[arg-type, return-value]
        "peer": Entry(lambda: FakeProcess("peer", journal, fails_at), {}),  # type: ignore[arg-type, return-value]
    }
    watch, ceilings = Watch(set(), 0.0, lambda text: None), FixedCeilings()
    return Contest(entries, WORK, watch, ceilings, lambda text: None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "wait_until_idle", lambda self: None)
    monkeypatch.setattr(noise, "_TRIES", 1)
    decode = BY_KEY["decode_b1_tok_s"]
    constant = Figure(
        decode.key, decode.label, more_is_better=True, measure=lambda timed, work: 7.0
    )
    monkeypatch.setattr("benchmarks.peers.rounds.FIGURES", (constant, *FIGURES[1:]))


def test_engines_take_turns_and_only_one_is_awake() -> None:
    journal: list[tuple[str, str]] = []
    running = contest(journal)
    running.run(2)
    awake: set[str] = set()
    for name, verb in journal:
        if verb in ("load", "resume"):
            awake.add(name)
        elif verb in ("stop", "close"):
            awake.discard(name)
        assert len(awake) <= 1, (name, verb)
    starts = [name for name, verb in journal if verb == "load"]
    assert starts == ["ropeway", "peer", "peer", "ropeway"]
    for record in running.records.values():
        assert len(record.samples["batch8_tok_s"]) == 2
        assert len(record.samples["ttft128_ms"]) == 6
        assert len(record.samples["peak_mib"]) == len(record.samples["load_s"]) == 2


@pytest.mark.parametrize("fails_at", [1, 3, 9])
def test_an_engine_that_fails_is_ended_named_and_not_asked_again(fails_at: int) -> None:
    journal: list[tuple[str, str]] = []
    running = contest(journal, fails_at)
    running.run(2)
    assert running.records["peer"].error == "fell over"
    assert [entry for entry in journal if entry == ("peer", "kill")] == [("peer", "kill")]
    assert max(i for i, (name, _) in enumerate(journal) if name == "peer") == journal.index(
        ("peer", "kill")
    )
    assert running.records["ropeway"].error is None
    assert len(running.records["ropeway"].samples["load_s"]) == 2


def test_no_engine_outlives_an_interrupt() -> None:
    journal: list[tuple[str, str]] = []
    running = contest(journal)

    def interrupt() -> None:
        raise KeyboardInterrupt

    running._ceilings.sample = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        running.run(1)
    ended = {name for name, verb in journal if verb == "kill"}
    assert ended == {"ropeway", "peer"}

"""What a run found: the table, and all samples as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropeway.runtime.bench.suite import Bounds
from ropeway.runtime.bench.workload import Workload

from .figures import FIGURES
from .roster import OURS, PEERS
from .rounds import Record
from .table import ratio, render


@dataclass(frozen=True)
class Report:
    """A finished run. `records` holds Ropeway and every peer that was asked for."""

    records: Mapping[str, Record]
    bounds: Bounds
    workload: Workload
    threads: int
    rounds: int

    def text(self) -> str:
        """The table, a line on each engine, and one on the machine."""
        medians = {name: record.medians() for name, record in self.records.items()}
        noise = max(record.others_share_max for record in self.records.values())
        ceilings = self.bounds.ceilings
        machine = (
            f"{_processor()}: {self.threads} threads, {self.rounds} rounds; "
            f"read {ceilings.read_gb_s:.1f} GB/s, bf16 GEMM {ceilings.gemm_bf16_gflop_s:.0f} "
            f"GFLOP/s ({ceilings.gemm_by}); others took at most {noise:.2f} of a core"
        )
        return render(medians, self.fractions(), self._notes()) + "\n\n" + machine

    def data(self) -> dict[str, Any]:
        """Everything, for JSON."""
        medians = {name: record.medians() for name, record in self.records.items()}
        return {
            "processor": _processor(),
            "threads": self.threads,
            "rounds": self.rounds,
            "read_gb_s": self.bounds.ceilings.read_gb_s,
            "gemm_bf16_gflop_s": self.bounds.ceilings.gemm_bf16_gflop_s,
            "ratio_to_best_peer": {figure.key: ratio(figure, medians) for figure in FIGURES},
            "fraction_of_bound": self.fractions(),
            "notes": self._notes(),
            "engines": {
                name: {
                    "median": medians[name],
                    "samples": record.samples,
                    "others_share_max": round(record.others_share_max, 3),
                    "error": record.error,
                }
                for name, record in self.records.items()
            },
        }

    def fractions(self) -> dict[str, float]:
        """Ropeway's figures as parts of their bounds; none where the GEMM rate wasn't measured."""
        if not self.bounds.ceilings.gemm_bf16_gflop_s:
            return {}
        medians = self.records[OURS].medians()
        return {
            figure.key: medians[figure.key] / figure.bound(self.bounds, self.workload)
            for figure in FIGURES
            if figure.bound is not None and figure.key in medians
        }

    def _notes(self) -> dict[str, str]:
        """Engine -> what it is, and why it failed or isn't there."""
        labels = {OURS: "this checkout"} | {name: peer.label for name, peer in PEERS.items()}
        return {name: self._note(name, label) for name, label in labels.items()}

    def _note(self, name: str, label: str) -> str:
        if name not in self.records:
            return f"{label}: left out on request"
        error = self.records[name].error
        return label if error is None else f"{label}: FAILED: {error}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"

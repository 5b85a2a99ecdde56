"""One artifact on this machine, loaded once; each part of the bench measures it and gives figures.

The profile comes last: it takes the KV blocks over, and nothing else runs on the engine after it.
"""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from ropeway.compiler.errors import InputError
from ropeway.compiler.targets.cpu.plan import TEMPLATE_FILE, decode_template
from ropeway.runtime.bench.arrivals import ArrivalFigures, make_arrivals, measure_arrivals
from ropeway.runtime.bench.capture import StepShape, capture, check_shape, default_shapes
from ropeway.runtime.bench.cost import model_cost
from ropeway.runtime.bench.machine import Ceilings
from ropeway.runtime.bench.neighbour import beside_neighbour
from ropeway.runtime.bench.quiet import Sampler, process_age
from ropeway.runtime.bench.roofline import Rates, StepProfile, profile_step
from ropeway.runtime.bench.suite import Bounds, fractions, run_suite
from ropeway.runtime.bench.trace import write_trace
from ropeway.runtime.bench.workload import Workload, make_workload, read_workload
from ropeway.runtime.engine_options import EngineOptions
from ropeway.runtime.llm import LLM
from ropeway.runtime.loader import load_engine
from ropeway.runtime.sampling.params import SamplingParams

_DECODES, _PREFILLS = 25, 9  # steps that a profile takes medians of

Figures = dict[str, Any]
Note = Callable[[str], None]


class Session:
    """A context manager: leaving it releases the engine."""

    def __init__(
        self,
        artifact: Path,
        threads: int | None,
        sampler: Sampler,
        ceilings: Ceilings,
        note: Note,
    ) -> None:
        """Loads the artifact; `note` is told what runs. Raises InputError when it isn't for cpu."""
        options = EngineOptions(num_threads=threads, enable_prefix_caching=False)
        self._engine = load_engine(artifact, options)
        self.load_s = round(process_age(), 3)
        self._llm = LLM.from_engine(self._engine)
        self._sampler = sampler
        self._note = note
        self._ceilings = ceilings
        try:
            self._cost = model_cost(self._engine.artifact)
        except InputError:
            self._llm.close()
            raise

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._llm.close()

    def workload(self, file: Path | None) -> Workload:
        """The file's, or the built-in one. Raises InputError when the program is too short."""
        llm = self._llm
        work = read_workload(file) if file else make_workload(llm.vocab_size)
        if work.longest > llm.max_model_len:
            raise InputError(
                f"the workload has sequences of {work.longest} tokens, {llm.artifact.path} holds "
                f"{llm.max_model_len}: give a shorter --workload FILE, or compile with a larger "
                f"--max-model-len"
            )
        return work

    def shapes(self, given: list[StepShape]) -> list[StepShape]:
        """The steps to profile: `given`, or the default ones that the program can have.

        Raises InputError for one that it can't have.
        """
        artifact = self._engine.artifact
        for shape in given:
            check_shape(artifact, shape)
        return given or default_shapes(artifact)

    def suite(self, work: Workload) -> Figures:
        """Decode, first token, prefill and batches."""
        figures: Figures = {"load_s": self.load_s}
        figures |= run_suite(self._generate, work, self._sampler, self._ceilings, self._note)
        before = self._llm.stats()
        self._generate(work.batch32, work.gen)
        after = self._llm.stats()
        host = after.host_seconds - before.host_seconds
        native = after.native_seconds - before.native_seconds
        figures["host_fraction_b32"] = round(host / (host + native), 4)
        figures["bytes_per_token"] = self._cost.weight_bytes
        figures["fraction"] = fractions(figures, work, Bounds(self._cost, self._ceilings))
        return figures

    def load(self, work: Workload) -> Figures:
        """What decoding suffers from: prompts that arrive, and a busy neighbour."""
        core = self._engine.core
        arrivals = make_arrivals(core.vocab_size, core.scheduler.max_model_len)
        runs: list[ArrivalFigures] = []

        def over_budget() -> float:
            runs.append(measure_arrivals(core, arrivals))
            return runs[-1].over_budget

        self._note(f"{len(arrivals)} requests, prompts arriving while others decode")
        ratio = self._sampler.median(over_budget)
        typical = min(runs, key=lambda run: abs(run.over_budget - ratio[0]))
        self._note("32 requests, alone and beside a busy neighbour")
        self._generate(work.batch32, 4)
        beside = beside_neighbour(lambda: self._batch_rate(work), self._sampler)
        return {
            "arrivals_tok_s": typical.output_tok_s,
            "arrivals_wait_ms": typical.decode.figures,
            "arrivals_mixed_wait_ms": typical.mixed.figures,
            "budget_tokens": typical.budget_tokens,
            "budget_step_ms": typical.budget_step_ms,
            "mixed_step_max_over_budget": ratio,
            **{f"batch32_{name}": value for name, value in beside.items()},
            "others_share_max": round(self._sampler.others_share_max, 3),
        }

    def _batch_rate(self, work: Workload) -> float:
        began = time.perf_counter()
        self._generate(work.batch32, work.gen)
        return len(work.batch32) * work.gen / (time.perf_counter() - began)

    def profile(self, shapes: list[StepShape], trace: Path | None) -> list[StepProfile]:
        """Where the steps' time goes; writes the trace of all of them too.

        Raises InputError when `trace` can't be written.
        """
        template = decode_template(self._engine.artifact.read(TEMPLATE_FILE))
        captures = []
        for shape in shapes:
            self._note(f"profile of {shape}")
            self._ceilings.sample()
            repeats = _DECODES if shape.kind == "decode" else _PREFILLS
            captures.append(capture(self._engine, shape, repeats))
        if trace is not None:
            write_trace(trace, template, captures)
            self._note(f"wrote {trace}")
        return [profile_step(template, one, Rates.of(self._ceilings)) for one in captures]

    @property
    def threads(self) -> int:
        """Threads that the engine computes with."""
        return self._engine.num_threads

    def _generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

"""A list of passes whose order is checked when it is built, and its run.

Facts flow through the list: each pass must find what it requires among the facts that the input
has (`given`) and earlier passes established, unless one destroyed them since. A pipeline is a
value; the editing methods return new ones, checked again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ropeway.compiler.errors import PipelineError, VerifyError
from ropeway.compiler.ir.graph import Module
from ropeway.compiler.ir.printer import print_module
from ropeway.compiler.ops.verifier import verify
from ropeway.compiler.pipeline.base import NearMiss, Pass, PassContext, PassResult
from ropeway.compiler.pipeline.report import MAX_NEAR_MISSES, MissReport, PassReport, Report
from ropeway.compiler.pipeline.spec import parse_spec, print_pass, print_spec


class Pipeline:
    """Passes in order, over an input of which the facts `given` hold.

    Raises PipelineError when a pass requires a fact that doesn't hold where it stands.
    """

    def __init__(self, passes: Iterable[Pass], *, given: Iterable[str] = ()) -> None:
        self.passes = tuple(passes)
        self.given = frozenset(given)
        _check_facts(self.passes, self.given)

    @classmethod
    def parse(
        cls,
        text: str,
        catalogue: Mapping[str, type[Pass]],
        *,
        given: Iterable[str] | None = None,
    ) -> Pipeline:
        """The pipeline that a spec string names; the inverse of `spec`.

        With `given` None the input is taken to hold each fact that some pass requires and no
        pass of the spec establishes: the order is still checked.
        """
        passes = parse_spec(text, catalogue)
        if given is None:
            needed = frozenset[str]().union(*(item.requires for item in passes))
            given = needed.difference(*(item.establishes for item in passes))
        return cls(passes, given=given)

    @property
    def spec(self) -> str:
        return print_spec(self.passes)

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pipeline):
            return NotImplemented
        return self.passes == other.passes and self.given == other.given

    def __hash__(self) -> int:
        return hash((self.passes, self.given))

    def __repr__(self) -> str:
        return f"Pipeline({self.spec!r})"

    def insert_after(self, name: str, *passes: Pass) -> Pipeline:
        """A pipeline with `passes` behind the last pass called `name`."""
        at = max(self._positions(name)) + 1
        return Pipeline(self.passes[:at] + passes + self.passes[at:], given=self.given)

    def insert_before(self, name: str, *passes: Pass) -> Pipeline:
        """A pipeline with `passes` ahead of the first pass called `name`."""
        at = min(self._positions(name))
        return Pipeline(self.passes[:at] + passes + self.passes[at:], given=self.given)

    def without(self, name: str) -> Pipeline:
        """A pipeline that lacks every pass called `name`."""
        gone = set(self._positions(name))
        kept = (item for at, item in enumerate(self.passes) if at not in gone)
        return Pipeline(kept, given=self.given)

    def run(
        self,
        module: Module,
        *,
        verify_each: bool = False,
        dump: Path | None = None,
        strict_fusion: bool = False,
    ) -> tuple[Module, Report]:
        """Run all passes; the result is always verified, with `verify_each` after every pass.

        `dump` is a folder that receives 00-input.ir and one file after each pass. Raises
        PipelineError naming the pass that failed, broke the module, or (with `strict_fusion`)
        is a fusion that matched nothing.
        """
        ctx = PassContext(strict_fusion=strict_fusion)
        entries: list[PassReport] = []
        _dump(dump, 0, "input", module)
        for number, item in enumerate(self.passes, 1):
            before = _count_ops(module)
            started = time.perf_counter()
            result = run_pass(item, module, ctx)
            elapsed = (time.perf_counter() - started) * 1e3
            module = result.module
            _dump(dump, number, item.name, module)
            if verify_each or number == len(self.passes):
                _verify_after(item, number, module)
            entries.append(_report(item, result, elapsed, before))
        return module, Report(spec=self.spec, passes=tuple(entries))

    def _positions(self, name: str) -> list[int]:
        found = [at for at, item in enumerate(self.passes) if item.name == name]
        if not found:
            names = ", ".join(dict.fromkeys(item.name for item in self.passes))
            raise PipelineError(f"the pipeline has no pass '{name}'; it has: {names}")
        return found


def run_pass(item: Pass, module: Module, ctx: PassContext) -> PassResult:
    """Run one pass and hold it to its contract; raises PipelineError on a strict fusion's miss."""
    result = item.run(module, ctx)
    if not isinstance(result, PassResult):
        raise PipelineError(
            f"pass '{item.name}' returned {type(result).__name__}, not a PassResult: "
            "return PassResult(module, matches, sites)"
        )
    if ctx.strict_fusion and item.phase == "fuse" and result.matches == 0:
        nearest = result.nearest_miss()
        reason = f"the nearest miss is {nearest}" if nearest else "no op resembles its pattern"
        raise PipelineError(
            f"pass '{item.name}' matched nothing and fusion is strict: {reason}; "
            "drop the pass or strict_fusion"
        )
    return result


def _check_facts(passes: tuple[Pass, ...], given: frozenset[str]) -> None:
    facts = given
    destroyed_by: dict[str, str] = {}
    for number, item in enumerate(passes, 1):
        for fact in sorted(item.requires - facts):
            raise PipelineError(
                f"pass '{item.name}' (number {number}) requires '{fact}', "
                + _why_missing(fact, passes, number, destroyed_by.get(fact))
            )
        for fact in item.destroys:
            destroyed_by[fact] = item.name
        facts = (facts - item.destroys) | item.establishes


def _why_missing(fact: str, passes: tuple[Pass, ...], number: int, destroyer: str | None) -> str:
    if destroyer is not None:
        return f"which '{destroyer}' destroys before it: move it ahead of '{destroyer}'"
    later = [item.name for item in passes[number:] if fact in item.establishes]
    if later:
        return f"which '{later[0]}' establishes only after it: move it behind '{later[0]}'"
    return "which no pass before it establishes: add a pass that does, or give it as a fact"


def _verify_after(item: Pass, number: int, module: Module) -> None:
    try:
        verify(module)
    except VerifyError as error:
        raise PipelineError(
            f"pass '{item.name}' (number {number}) left a module that doesn't verify: {error}"
        ) from error


def _dump(folder: Path | None, number: int, name: str, module: Module) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02d}-{name}.ir").write_text(print_module(module), encoding="utf-8")
    except OSError as error:
        raise PipelineError(
            f"dump folder {folder} can't be written ({error.strerror}); name one that can"
        ) from error


def _count_ops(module: Module) -> int:
    return sum(len(function.ops) for function in module.functions.values())


def _report(item: Pass, result: PassResult, elapsed: float, ops_before: int) -> PassReport:
    return PassReport(
        name=item.name,
        spec=print_pass(item),
        phase=item.phase,
        numerics=item.numerics.value,
        matches=result.matches,
        sites=tuple(result.sites),
        near_misses=group_misses(result.near_misses),
        ms=round(elapsed, 3),
        ops_before=ops_before,
        ops_after=_count_ops(result.module),
    )


def group_misses(misses: Iterable[NearMiss]) -> tuple[MissReport, ...]:
    """One entry for each constraint, the nearest first, with how often it failed."""
    groups: dict[str, MissReport] = {}
    for miss in misses:
        seen = groups.get(miss.constraint)
        if seen is None or miss.depth > seen.depth:
            count = 1 if seen is None else seen.count + 1
            groups[miss.constraint] = MissReport(
                op=miss.op, constraint=miss.constraint, loc=miss.loc, count=count, depth=miss.depth
            )
        else:
            groups[miss.constraint] = _recount(seen)
    ordered = sorted(groups.values(), key=lambda entry: -entry.depth)
    return tuple(ordered[:MAX_NEAR_MISSES])


def _recount(entry: MissReport) -> MissReport:
    return MissReport(
        op=entry.op,
        constraint=entry.constraint,
        loc=entry.loc,
        count=entry.count + 1,
        depth=entry.depth,
    )

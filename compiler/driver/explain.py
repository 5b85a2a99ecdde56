"""Text for a person: what a program is, what was fused and what wasn't, what it needs to run."""

from collections.abc import Iterator, Mapping
from itertools import groupby

from ropeway.compiler.artifact.manifest import CacheGroup, Manifest
from ropeway.compiler.artifact.reports import MEMORY_FILE, PASSES_FILE, MemoryReport
from ropeway.compiler.pipeline.report import PassReport, Report

_SITES = 4
_MISSES = 3
_CLOSE = 2  # constraints that held; with fewer an op only has the right name


def explain(
    manifest: Manifest,
    files: Mapping[str, bytes],
    available: int | None = None,
    *,
    every_bucket: bool = False,
) -> str:
    """The whole text; `files` are the artifact's small files.

    With `available` (bytes of memory that could hold KV blocks) it says how many sequences fit.
    Memory is that of the smallest and largest bucket, or of `every_bucket`.
    """
    lines = [*_identity(manifest)]
    if PASSES_FILE in files:
        lines += ["", *_fusions(Report.from_json(files[PASSES_FILE]))]
    if MEMORY_FILE in files:
        memory = MemoryReport.from_json(files[MEMORY_FILE])
        lines += ["", *_memory(manifest, memory, every_bucket)]
    lines += ["", *_caches(manifest, available)]
    return "\n".join(lines)


def _identity(manifest: Manifest) -> Iterator[str]:
    model = manifest.model
    yield f"{model.name}: {model.architecture}, {model.parameters / 1e6:.1f} M parameters"
    yield (
        f"  target {manifest.target}, {manifest.dtype}, vocabulary {model.vocab_size}, up to "
        f"{model.max_model_len} tokens a sequence, {manifest.max_num_batched_tokens} a step"
    )
    function = manifest.functions[0]
    yield f"  program {function.fingerprint[:16]}, format {manifest.format}"
    yield f"  made by ropeway {manifest.producer}; again with: {manifest.command}"
    numerics = manifest.numerics
    invariant = "bit-equal in any batch" if numerics.batch_invariant else "may vary with the batch"
    yield (
        f"  numerics: {numerics.activations} between ops, {numerics.compute} inside, {invariant}; "
        f"passes {numerics.passes}"
    )


def _fusions(report: Report) -> Iterator[str]:
    yield "Fused:"
    fusions = [entry for entry in report.passes if entry.phase == "fuse"]
    for entry in fusions:
        if entry.matches:
            yield f"  {entry.name:<16} {entry.matches:>4}  {_sites(entry)}"
    missed = [line for entry in fusions for line in _missed(entry)]
    yield "Not fused:" if missed else "Not fused: nothing"
    yield from missed
    names = dict.fromkeys(e.name for e in report.passes if e.phase != "fuse" and e.matches)
    if names:
        yield "Other passes: " + ", ".join(f"{name} {report.matches(name)}" for name in names)


def _missed(entry: PassReport) -> Iterator[str]:
    """Why a fusion didn't match where it might have; of one that matched, only close calls."""
    least = _CLOSE if entry.matches else 0
    misses = [miss for miss in entry.near_misses if miss.depth >= least]
    if not misses and not entry.matches:
        yield f"  {entry.name:<16} nothing resembles its pattern"
    for miss in misses[:_MISSES]:
        where = f" at {miss.loc}" if miss.loc else ""
        yield f"  {entry.name:<16} {miss.count:>4}  {miss.op}{where}: {miss.constraint}"


def _sites(entry: PassReport) -> str:
    """The places, each once with its count, the first few by name."""
    counted = [(site, len(list(same))) for site, same in groupby(sorted(entry.sites))]
    named = [f"{site} x{count}" if count > 1 else site for site, count in counted[:_SITES]]
    rest = len(counted) - len(named)
    return ", ".join(named) + (f" and {rest} more" if rest else "")


def _memory(manifest: Manifest, memory: MemoryReport, every: bool) -> Iterator[str]:
    yield f"Memory: weights {size(memory.weight_bytes)}"
    if not any(entry.arena_bytes for entry in memory.buckets):
        names = ", ".join(bucket.name for bucket in manifest.buckets)
        yield f"  target {manifest.target} allocates as it runs; buckets {names}"
        return
    by_size = sorted(memory.buckets, key=lambda e: (e.arena_bytes, e.without_reuse_bytes))
    fold = not every and len(by_size) > 2
    for entry in (by_size[0], by_size[-1]) if fold else memory.buckets:
        yield (
            f"  {entry.bucket.name:<20} arena {size(entry.arena_bytes):>10} for "
            f"{entry.buffers} buffers ({size(entry.without_reuse_bytes)} without reuse)"
        )
    if fold:
        yield f"  and {len(by_size) - 2} buckets between these (inspect --memory shows all)"


def _caches(manifest: Manifest, available: int | None) -> Iterator[str]:
    for group in manifest.cache_groups:
        planes = ", ".join(f"{p.name} {p.dtype}{list(p.shape)}" for p in group.planes)
        window = f"window {group.window}" if group.window else "full attention"
        yield (
            f"KV cache group {group.group}: {group.layers} layers, {planes}, {window}, blocks of "
            f"{group.block_size} tokens, {size(group.bytes_per_token)} a token"
        )
    if not manifest.cache_groups:
        yield "No KV cache: every step is one whole sequence"
        return
    longest = sequence_bytes(manifest.cache_groups, manifest.model.max_model_len)
    per_token = sum(group.bytes_per_token for group in manifest.cache_groups)
    yield f"KV bytes per token: {per_token}; a sequence of full length takes {size(longest)}"
    if available is not None:
        yield (
            f"In {size(available)} of cache fit {available // max(1, longest)} sequences of "
            f"{manifest.model.max_model_len} tokens, {available // max(1, per_token)} tokens in all"
        )


def sequence_bytes(groups: tuple[CacheGroup, ...], tokens: int) -> int:
    """Bytes of the KV blocks that one sequence of `tokens` tokens takes, whole blocks."""
    return sum(-(-tokens // group.block_size) * group.bytes_per_block for group in groups)


def size(count: int) -> str:
    """A byte count for a person: 512 B, 3.0 KiB, 256.4 MiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"

"""The most memory that a process and its children have held."""

from pathlib import Path

_PROC = Path("/proc")


def peak_mib(root: int) -> float:
    """Largest resident sizes of `root` and all below it, summed; shared pages count once.

    What each process shares (resident less proportional size) is taken as it is now; the peak
    itself is the kernel's own high-water mark.
    """
    return sum(_peak_kib(pid) for pid in _tree(root)) / 1024


def _tree(root: int) -> list[int]:
    parents = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            parents[int(entry.name)] = int(fields[1])
    found = [root]
    for pid in found:  # grows while it is walked
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _peak_kib(pid: int) -> int:
    try:
        peak = _field(_PROC / str(pid) / "status", "VmHWM:")
        rollup = _PROC / str(pid) / "smaps_rollup"
        return peak - (_field(rollup, "Rss:") - _field(rollup, "Pss:"))
    except OSError:
        return 0


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0

"""One table: figures down, engines across, then Ropeway / best peer and its part of the bound."""

from collections.abc import Mapping

from .figures import FIGURES, Figure
from .roster import OURS

Medians = Mapping[str, Mapping[str, float]]  # engine -> figure key -> median


def best_peer(figure: Figure, medians: Medians) -> str | None:
    """The peer that is best in a figure; None if no peer has it."""
    values = {
        name: found[figure.key]
        for name, found in medians.items()
        if name != OURS and figure.key in found
    }
    if not values:
        return None
    return (max if figure.more_is_better else min)(values, key=values.__getitem__)


def ratio(figure: Figure, medians: Medians) -> float | None:
    """Ropeway's figure / the best peer's, whichever way is better; None if either is missing."""
    best, ours = best_peer(figure, medians), medians.get(OURS, {}).get(figure.key)
    return None if best is None or ours is None else ours / medians[best][figure.key]


def render(medians: Medians, fractions: Mapping[str, float], notes: Mapping[str, str]) -> str:
    """The table in Markdown; `notes` (engine -> text) stand below it, errors among them."""
    header = ["figure", *medians, "ropeway / best peer", "of its bound"]
    rows = [[_label(figure), *_cells(figure, medians, fractions)] for figure in FIGURES]
    lines = [_row(header), _row(["---"] * len(header)), *map(_row, rows), ""]
    lines += [f"{name}: {text}" for name, text in notes.items()]
    return "\n".join(lines)


def _label(figure: Figure) -> str:
    return figure.label if figure.more_is_better else f"{figure.label} (less is better)"


def _cells(figure: Figure, medians: Medians, fractions: Mapping[str, float]) -> list[str]:
    cells = [
        _number(found[figure.key]) if figure.key in found else "-" for found in medians.values()
    ]
    share, best = ratio(figure, medians), best_peer(figure, medians)
    cells.append("-" if share is None else f"{share:.2f} ({best})")
    cells.append(f"{fractions[figure.key]:.2f}" if figure.key in fractions else "")
    return cells


def _number(value: float) -> str:
    """Three digits or more, no needless ones."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"

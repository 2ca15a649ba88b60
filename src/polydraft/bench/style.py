"""How figures look: colours, panels, and files that are equal where the figures are."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5c5c5c")
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "polydraft",
    "svg.fonttype": "path",
    "text.parse_math": False,  # names come from outside, and a dollar sign in one is no formula
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def save(draw: Callable[[], "Figure"], path: Path) -> Path:
    """Draw a figure in polydraft's style and write it; equal figures give equal files."""
    from matplotlib import rc_context

    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # a box is drawn in its place
        draw().savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, bbox_inches="tight", dpi=110)
    return path


def panels(titles: Sequence[str], height: float, **options: Any) -> tuple["Figure", list["Axes"]]:
    """Return a figure with one panel per title, side by side, axes shared."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(4.2, 3.4 * len(titles)), height), layout="constrained")
    axes = figure.subplots(1, len(titles), squeeze=False, **options)[0]
    for one, title in zip(axes, titles, strict=True):
        one.set_title(title)
    return figure, list(axes)

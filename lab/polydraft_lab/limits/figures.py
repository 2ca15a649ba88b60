"""Figures of the limits: acceptance against temperature and number of drafts, gaps by rule; reproducible SVG."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polydraft.bench.style import COLOURS, panels, save
from polydraft.extras import FIGURES
from polydraft_lab.limits.cases import NAIVE, node_cases
from polydraft_lab.limits.summary import NodeResult, nearest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TYPICAL_TEMPERATURE, TYPICAL_DRAFTS = 0.7, 3
"""Where one value of a sweep is shown it is the one nearest to these, the settings of Hu et al., arXiv 2502.18779."""
MARKERS = "osD^vPX*"
VISIBLE = 1e-4
"""Gaps below this do not show in a figure."""


def draw_figures(nodes: Sequence[NodeResult], folder: Path) -> list[Path]:
    """Draw all figures that the results allow and return their files.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    FIGURES.check()
    temperature = nearest([one.temperature for one in nodes], TYPICAL_TEMPERATURE)
    drafts = int(nearest([one.k for one in nodes], TYPICAL_DRAFTS))
    at_k = [one for one in nodes if one.k == drafts]
    at_temperature = [one for one in nodes if one.temperature == temperature]
    both = [one for one in at_k if one.temperature == temperature]
    figures: dict[str, tuple[bool, Callable[[], Figure]]] = {
        "acceptance_by_temperature": (
            len({one.temperature for one in nodes}) > 1,
            lambda: curves(at_k, lambda one: one.temperature, "temperature", f"{drafts} drafts"),
        ),
        "acceptance_by_drafts": (
            len({one.k for one in nodes}) > 1,
            lambda: curves(at_temperature, lambda one: one.k, "number of drafts", f"temperature {temperature:g}"),
        ),
        "gap_by_rule": (
            bool(both),
            lambda: gaps(both, f"{drafts} drafts, temperature {temperature:g}"),
        ),
    }
    return [save(draw, folder / f"{name}.svg") for name, (possible, draw) in figures.items() if possible]


def colour_of(scheme: str) -> str:
    """Return a scheme's colour, the same in all figures."""
    known = list(dict.fromkeys(case.scheme.name for case in node_cases()))
    return COLOURS[known.index(scheme) % len(COLOURS)] if scheme in known else COLOURS[-1]


def curves(results: Sequence[NodeResult], x_of: Callable[[NodeResult], float], x_name: str, condition: str) -> "Figure":
    """Draw acceptance against one setting, a panel per task.

    A scheme has a colour; its optimum is a solid line, its rules are dashed lines with markers. Rules that reach the
    optimum everywhere are named beside it instead.
    """
    tasks = list(dict.fromkeys(one.task for one in results))
    schemes = list(dict.fromkeys(one.scheme for one in results))
    figure, axes = panels(tasks, 4.6, sharey=True)
    for task, axis in zip(tasks, axes, strict=True):
        for scheme in schemes:
            _draw_scheme(axis, task, [one for one in results if one.scheme == scheme], x_of, colour_of(scheme))
        axis.set_xlabel(x_name)
        axis.set_xticks(sorted({x_of(one) for one in results}))
    axes[0].set_ylabel("acceptance rate")
    figure.suptitle(f"Acceptance and its optimum, {condition}", fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(tasks) + 1))
    return figure


def _draw_scheme(
    axis: "Axes", task: str, results: Sequence[NodeResult], x_of: Callable[[NodeResult], float], colour: str
) -> None:
    """Draw one scheme of one task; `results` are those of all tasks, which are to have the same legend."""
    scheme = results[0].scheme
    shown, reached = _apart(without_naive(results))
    best = sorted({x_of(one): one.optimum.mean for one in results if one.task == task}.items())
    label = f"{scheme}: optimum" + (f" = {', '.join(reached)}" if reached else "")
    axis.plot(*zip(*best, strict=True), color=colour, linewidth=1.8, label=label)
    for rule, marker in zip(dict.fromkeys(one.rule for one in shown), MARKERS * 8, strict=False):
        points = sorted((x_of(one), one.acceptance.mean) for one in shown if (one.task, one.rule) == (task, rule))
        axis.plot(
            *zip(*points, strict=True),
            color=colour,
            linewidth=0.9,
            linestyle=(0, (4, 2)),
            marker=marker,
            markersize=4,
            markerfacecolor="white",
            label=f"{scheme}: {rule}",
        )


def _apart(results: Sequence[NodeResult]) -> tuple[list[NodeResult], list[str]]:
    """Split into results of rules that are below the optimum anywhere, and the names of those that never are."""
    below = {one.rule for one in results if one.gap.mean > VISIBLE}
    reached = dict.fromkeys(one.rule for one in results if one.rule not in below)
    return [one for one in results if one.rule in below], list(reached)


def without_naive(results: Sequence[NodeResult]) -> list[NodeResult]:
    """Leave naive match out where a scheme has other rules: it is so far below them that it would hide the others."""
    others = {one.scheme for one in results if one.rule != NAIVE}
    return [one for one in results if one.rule != NAIVE or one.scheme not in others]


def gaps(results: Sequence[NodeResult], condition: str) -> "Figure":
    """Draw each rule's gap to its scheme's optimum, in points, a panel per task; bars are 95 % intervals."""
    shown = without_naive(results)
    tasks = list(dict.fromkeys(one.task for one in shown))
    rows = list(dict.fromkeys((one.scheme, one.rule) for one in shown))
    figure, axes = panels(tasks, 1.0 + 0.26 * len(rows), sharey=True, sharex=True)
    for task, axis in zip(tasks, axes, strict=True):
        axis.axvline(0, color="#999999", linewidth=0.8)
        for one in (one for one in shown if one.task == task):
            place = rows.index((one.scheme, one.rule))
            colour = colour_of(one.scheme)
            low, high = (one.gap.mean if end is None else end for end in (one.gap.low, one.gap.high))
            axis.plot([100 * low, 100 * high], [place, place], color=colour, linewidth=1.6, solid_capstyle="butt")
            axis.plot([100 * one.gap.mean], [place], color=colour, marker="o", markersize=4.5)
        axis.set_xlabel("gap to the optimum, points")
    axes[0].set_yticks(range(len(rows)), [f"{scheme}: {rule}" for scheme, rule in rows])
    axes[0].invert_yaxis()
    figure.suptitle(f"Gap to the scheme's optimal acceptance, {condition}", fontsize=11)
    return figure

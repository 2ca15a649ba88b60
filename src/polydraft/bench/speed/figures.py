"""Figures of the benchmark: speed-ups with intervals, block efficiency by task, where the time goes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polydraft.bench.bootstrap import Estimate
from polydraft.bench.prompts import ALL
from polydraft.bench.speed.arms import PLAIN
from polydraft.bench.speed.summary import TIMED, ArmResult, milliseconds, overall
from polydraft.bench.style import COLOURS, panels, save
from polydraft.extras import FIGURES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#999999"
BELOW = 0.2
"""How far below an arm's mean, in rows, the dots of its prompts lie."""
Draw = Callable[["Axes", Sequence[ArmResult], Sequence[str]], None]


def draw_speed_figures(results: Sequence[ArmResult], folder: Path) -> list[Path]:
    """Draw all figures that have anything to show, one set for each batch size, and return their files.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    FIGURES.check()
    files: list[Path] = []
    sizes = sorted({one.batch_size for one in results})
    for size in sizes:
        here = [one for one in results if one.batch_size == size]
        ending, condition = (f"_batch_{size}", f", batch {size}") if len(sizes) > 1 else ("", f", batch {size}")
        drafting = [one for one in here if one.block_efficiency is not None and one.arm != PLAIN]
        timed = [one for one in overall(here) if one.statistics is not None]
        shown = {"speed_up": here, "block_efficiency": drafting, "time": timed}
        drawn: dict[str, Callable[[], Figure]] = {
            "speed_up": lambda here=here, condition=condition: speed_ups(here, condition),
            "block_efficiency": lambda here=here, condition=condition: efficiencies(here, condition),
            "time": lambda here=here, condition=condition: times(here, condition),
        }
        files += [save(draw, folder / f"{name}{ending}.svg") for name, draw in drawn.items() if shown[name]]
    return files


def speed_ups(results: Sequence[ArmResult], condition: str) -> "Figure":
    """Draw each arm's speed-up with its interval, and as faint dots those of single prompts."""

    def draw(axis: "Axes", here: Sequence[ArmResult], arms: Sequence[str]) -> None:
        axis.axvline(1, color=GREY, linewidth=0.9)
        for one in here:
            place, found = arms.index(one.arm), one.speed_up
            colour = COLOURS[1] if found.total.mean < 1 else COLOURS[0]
            dots = [place + BELOW] * len(found.by_prompt)
            axis.plot(found.by_prompt, dots, "o", color=GREY, alpha=0.5, markersize=3, markeredgewidth=0)
            _with_bar(axis, found.total, place, colour)
            label = f"{found.total.mean:.2f}x"
            axis.annotate(label, (found.total.mean, place), (0, 6), textcoords="offset points", ha="center", fontsize=8)
        axis.set_xlabel("speed-up over plain decoding")

    arms = [one for one in overall(results) if one.arm != PLAIN] or overall(results)
    return _arms_by_temperature(arms, f"Speed-up, 95 % intervals; dots are prompts{condition}", draw)


def efficiencies(results: Sequence[ArmResult], condition: str) -> "Figure":
    """Draw each arm's block efficiency, a colour per task."""
    known = [one for one in results if one.block_efficiency is not None and one.arm != PLAIN]
    tasks = [task for task in dict.fromkeys(one.task for one in known) if task != ALL]

    def draw(axis: "Axes", here: Sequence[ArmResult], arms: Sequence[str]) -> None:
        axis.axvline(1, color=GREY, linewidth=0.9)
        for number, task in enumerate(tasks):
            shift = 0.5 * ((number + 0.5) / len(tasks) - 0.5)
            for one in here:
                if one.task == task and one.block_efficiency is not None:
                    _with_bar(axis, one.block_efficiency, arms.index(one.arm) + shift, COLOURS[number % len(COLOURS)])
            axis.plot([], [], "o", color=COLOURS[number % len(COLOURS)], label=task)
        axis.set_xlabel("tokens per target call")

    return _arms_by_temperature(known, f"Block efficiency by task, 95 % intervals{condition}", draw)


def times(results: Sequence[ArmResult], condition: str) -> "Figure":
    """Draw where the time goes: a bar per arm, its parts in milliseconds per new token."""
    known = [one for one in overall(results) if one.statistics is not None]

    def draw(axis: "Axes", here: Sequence[ArmResult], arms: Sequence[str]) -> None:
        for number, part in enumerate(TIMED):
            found = [(arms.index(one.arm), milliseconds(one)) for one in here]
            before = [sum(parts[name] for name in TIMED[:number]) for _, parts in found]
            places, lengths = [place for place, _ in found], [parts[part] for _, parts in found]
            axis.barh(places, lengths, left=before, height=0.6, color=COLOURS[number], label=part)
        axis.set_xlabel("ms per new token")
        axis.grid(visible=False, axis="y")

    return _arms_by_temperature(known, f"Where the time goes{condition}", draw)


def _arms_by_temperature(results: Sequence[ArmResult], title: str, draw: Draw) -> "Figure":
    arms = list(dict.fromkeys(one.arm for one in results))
    temperatures = sorted({one.temperature for one in results})
    names = [f"temperature {temperature:g}" for temperature in temperatures]
    figure, axes = panels(names, 1.6 + 0.42 * len(arms), sharex=True, sharey=True)
    for temperature, axis in zip(temperatures, axes, strict=True):
        draw(axis, [one for one in results if one.temperature == temperature], arms)
    axes[0].set_yticks(range(len(arms)), arms)
    axes[0].set_ylim(len(arms) - 0.4, -0.6)
    figure.suptitle(title, fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5))
    return figure


def _with_bar(axis: "Axes", one: Estimate, place: float, colour: str) -> None:
    if one.low is not None and one.high is not None:
        axis.plot([one.low, one.high], [place, place], color=colour, linewidth=1.8, solid_capstyle="butt")
    axis.plot([one.mean], [place], "o", color=colour, markersize=4.5, markeredgecolor="white", markeredgewidth=0.6)

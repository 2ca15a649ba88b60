"""What is written beside a made draft: its card, and its curve as a picture and for the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

WIDTH, HEIGHT, EDGE = 480, 240, 40
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
BAR = 30
CURVE_PICTURE = "curve.svg"


@dataclass(frozen=True)
class CurvePoint:
    """What a draft was worth on held-out text after so many steps.

    Args:
        step: of the whole run, the trial that it went on from included; 0 before any training.
        calls: tokens per target call of chains of five, verified as a block, by temperature.
        score: their geometric mean.
        overlap: mean of sum_x min(target, draft) of the first draft, by temperature.
        minutes: of the budget that were spent.
    """

    step: int
    calls: dict[str, float]
    score: float
    overlap: dict[str, float]
    minutes: float

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return asdict(self)


def best_of(curve: Sequence[CurvePoint]) -> CurvePoint:
    """Return the point that is kept: the first of the highest that are numbers."""
    return max(curve, key=lambda one: one.score if isfinite(one.score) else float("-inf"))


def curve_lines(curve: Sequence[CurvePoint]) -> list[str]:
    """Return the curve as lines of text, a bar each, of points that are numbers."""
    curve = [one for one in curve if isfinite(one.score)]
    if not curve:
        return []
    lowest, highest = min(one.score for one in curve), max(one.score for one in curve)
    span, best = max(highest - lowest, 1e-9), best_of(curve)
    return [
        f"step {one.step:>6} {'#' * (1 + round((BAR - 1) * (one.score - lowest) / span)):<{BAR}} "
        + "  ".join(f"T={heat} {calls:.3f}" for heat, calls in one.calls.items())
        + ("  best" if one is best else "")
        for one in curve
    ]


def curve_svg(curve: Sequence[CurvePoint]) -> str:
    """Draw tokens per call over steps, a line for each temperature, the kept point marked."""
    values = [calls for one in curve for calls in one.calls.values()]
    low, high, last = min(values), max(values), max(max(one.step for one in curve), 1)
    span = max(high - low, 1e-9)

    def place(step: int, value: float) -> tuple[float, float]:
        x = EDGE + (WIDTH - 2 * EDGE) * step / last
        return round(x, 1), round(HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * (value - low) / span, 1)

    best, parts = best_of(curve), list[str]()
    for number, heat in enumerate(curve[0].calls):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(",".join(map(str, place(one.step, one.calls[heat]))) for one in curve)
        x, y = place(best.step, best.calls[heat])
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>',
            f'<text x="{EDGE + 4}" y="{EDGE - 22 + 13 * number}" fill="{colour}">temperature {heat}</text>',
        ]
    axes = f"M{EDGE} {EDGE}V{HEIGHT - EDGE}H{WIDTH - EDGE}"
    labels = [
        (4, HEIGHT - EDGE, f"{low:.2f}"),
        (4, EDGE + 4, f"{high:.2f}"),
        (WIDTH - EDGE - 20, HEIGHT - 22, str(last)),
    ]
    parts += [f'<text x="{x}" y="{y}">{text}</text>' for x, y, text in labels]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="11"><title>Tokens per target call on held-out text, by step</title>'
        f'<path d="{axes}" fill="none" stroke="#888"/>{"".join(parts)}</svg>\n'
    )


def curve_table(curve: Sequence[CurvePoint]) -> str:
    """Return the curve in Markdown, a line for each point."""
    heats = list(curve[0].calls) if curve else []
    rows = [
        f"| {one.step} | {' | '.join(f'{one.calls[heat]:.3f}' for heat in heats)} |"
        + (" kept |" if one is best_of(curve) else " |")
        for one in curve
    ]
    head = f"| step | {' | '.join(f'temperature {heat}' for heat in heats)} | |"
    return "\n".join([head, f"|---|{'---|' * len(heats)}---|", *rows])


def card_of(facts: Mapping[str, Any], curve: Sequence[CurvePoint], verdict: str) -> str:
    """Return the text of a made draft's README.md.

    Args:
        facts: target, form, loss, data and recipe, by name.
        curve: what it was worth.
        verdict: in sentences.
    """
    recipe = "\n".join(f"* {name}: {value}" for name, value in facts.items())
    return f"""# A draft for {facts["target"]}

Made by `polydraft align`. It drafts; texts have the target's own law.

    polydraft generate --target {facts["target"]} --draft THIS_FOLDER "..."

## Verdict

{verdict}

## Tokens per target call on held-out text

Chains of five drafts, verified as a block. The step with "kept" is what is here, rounded to bfloat16 after it was
measured.

{curve_table(curve)}

## Data and recipe

{recipe}
"""

"""Measure BiLD on the embedded pair, and write the table and the figure of docs/bild.md from the record.

    python docs/bild/make.py --measure    # six more prompts, appended to docs/bild/pair.jsonl: under a minute
    python docs/bild/make.py              # the table in docs/bild.md, and docs/pictures/bild.svg

The figure needs `pip install ".[figures]"`. A line of the record is a text: what it took, and how it compares with the
greedy one. Log-probabilities are computed behind the clock, by one pass over the text.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

import polydraft
from polydraft.bench import read_prompt_sets
from polydraft.bench.environment import load, machine, versions
from polydraft.bench.prompts.prompt import encode
from polydraft.bench.style import COLOURS, panels, save
from polydraft.trees import Confident
from polydraft.trees.growing import Drawn, Opened
from polydraft.verifiers import Rollback

DOCS = Path(__file__).parents[1]
RECORD, PAGE, PICTURE = DOCS / "bild" / "pair.jsonl", DOCS / "bild.md", DOCS / "pictures" / "bild.svg"
MARKS = "<!-- table: bild -->\n", "<!-- end of table -->"
THRESHOLDS, FALLBACKS = (0.0, 1.0, 2.0, 3.0, 5.0), (0.4, 0.6, 0.8)
LENGTH, NEW, AT_ONCE = 10, 64, 6
Arm = tuple[float, float, bool]
"""Threshold, fallback, and whether the doubtful token is dropped."""
ARMS: list[Arm] = [(nats, share, False) for share in FALLBACKS for nats in THRESHOLDS]
ARMS += [(nats, 0.6, True) for nats in THRESHOLDS]
EXACT = "exact default"
"""The arm that drafts with the same draft model as polydraft does if nothing else is said."""


@dataclass(frozen=True)
class Published(Confident):
    """As in BiLD a doubtful token is not drafted: a row without a likely token gets no children."""

    def opened(self, drawn: Drawn) -> Bool[Tensor, "b c"]:
        """Open every node, since its row must be seen."""
        return torch.ones_like(drawn.there)

    def counts(self, opened: Opened) -> Int[Tensor, "b f"]:
        """Give children to nodes whose likeliest token is likely enough."""
        return super().counts(opened) * (opened.likeliest(1)[..., 0] >= self.threshold)


def options_of(pair: Any, arm: Arm | str | None) -> dict[str, Any]:
    """Return the options of an arm; None is plain decoding."""
    common: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NEW, "eos_token_id": pair.target.config.vocab_size}
    if arm is None:
        return {**common, "drafter": "none"}
    if isinstance(arm, str):
        return {**common, "drafter": pair.draft}
    threshold, fallback, dropped = arm
    policy = (Published if dropped else Confident)((1,) * LENGTH, fallback)
    return {**common, "drafter": pair.draft, "verifier": Rollback(threshold=threshold), "policy": policy}


def measured(burst: int) -> Iterator[dict[str, Any]]:
    """Write the prompts of a burst by all arms in turn, and yield a line for each text."""
    pair = polydraft.load_pair()
    every = read_prompt_sets(("python", "humaneval"), 10)
    prompts = [encode(pair, one, 64) for one in every[burst * AT_ONCE : (burst + 1) * AT_ONCE]]
    arms = [None, EXACT, *ARMS]
    for arm in arms:
        polydraft.stream(pair.target, prompts[0], **{**options_of(pair, arm), "max_new_tokens": 8}).exhaust()
    for number, prompt in enumerate(prompts):
        greedy = list[int]()
        for arm in arms:
            run = polydraft.stream(pair.target, prompt, **options_of(pair, arm)).exhaust()
            (tokens,), statistics = run.new_tokens, run.statistics
            greedy = greedy or tokens
            with torch.inference_mode():
                text = run.sequences(prompt, 0)
                rows = pair.target(text).logits[0, prompt.shape[1] - 1 : -1].double().log_softmax(-1)
            yield {
                "arm": arm,
                "prompt": burst * AT_ONCE + number,
                "burst": burst,
                "seconds": round(statistics.seconds["total"] - statistics.seconds["prefill"], 5),
                "calls": statistics.target_calls,
                "tokens": tokens,
                "same": sum(one == other for one, other in zip(tokens, greedy, strict=True)),
                "own": int((rows.argmax(-1) == torch.tensor(tokens)).sum()),
                "nats": round(float(rows.gather(-1, torch.tensor(tokens).unsqueeze(-1)).sum()), 4),
            }


def measure() -> None:
    """Append one more burst to the record."""
    before = RECORD.read_text().splitlines() if RECORD.exists() else []
    burst = sum(json.loads(line).get("kind") == "conditions" for line in before)
    pair = polydraft.load_pair()
    told = {"kind": "conditions", "machine": machine(pair.target.device), "load": load(), **versions()}
    lines = [told, *measured(burst)]
    RECORD.write_text("\n".join([*before, *map(json.dumps, lines)]) + "\n")


@dataclass(frozen=True)
class Summary:
    """What an arm did over all texts: speed-up, tokens per call, shares of its tokens, their mean log-probability."""

    arm: Arm | str
    speed_up: float
    per_call: float
    same: float
    own: float
    log_prob: float

    def cells(self) -> list[str]:
        """Return its row of the table."""
        shares = (f"{100 * self.same:.1f} %", f"{100 * self.own:.1f} %", f"{self.log_prob:.3f}")
        numbers = [f"{self.speed_up:.2f}x", f"{self.per_call:.2f}", *shares]
        if isinstance(self.arm, str):
            return [self.arm, "", "", *numbers]
        threshold, fallback, dropped = self.arm
        return [
            f"{threshold:g}",
            f"{fallback:g}",
            "dropped" if dropped else "kept",
            *numbers,
        ]


def summaries() -> list[Summary]:
    """Read the record."""
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()]
    texts = [line for line in lines if line.get("kind") != "conditions"]
    bursts = sorted({line["burst"] for line in texts})

    def of(arm: Arm | str | None) -> list[dict[str, Any]]:
        return [line for line in texts if line["arm"] == ([*arm] if isinstance(arm, tuple) else arm)]

    def seconds(arm: Arm | str | None, burst: int) -> float:
        return sum(line["seconds"] for line in of(arm) if line["burst"] == burst)

    found = list[Summary]()
    for arm in (EXACT, *ARMS):
        own = of(arm)
        tokens = sum(len(line["tokens"]) for line in own)
        speed_up = median(seconds(None, burst) / seconds(arm, burst) for burst in bursts)
        sums = {name: sum(line[name] for line in own) for name in ("calls", "same", "own", "nats")}
        rest = (tokens / sums["calls"], sums["same"] / tokens, sums["own"] / tokens, sums["nats"] / tokens)
        found.append(Summary(arm, speed_up, *rest))
    return found


HEADER = [
    "threshold",
    "fallback",
    "doubtful token",
    "speed-up",
    "tokens/call",
    "as the greedy text",
    "own choice",
    "log p",
]


def table(found: Sequence[Summary]) -> str:
    """Return the table in Markdown."""
    rows = [HEADER, ["---:"] * len(HEADER), *(one.cells() for one in found)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_table(page: str) -> str:
    """Return the page with the table of the record."""
    head, rest = page.split(MARKS[0])
    return head + MARKS[0] + table(summaries()) + MARKS[1] + rest.split(MARKS[1])[1]


def curves() -> Any:
    """Draw log-probability and agreement against speed, a line for each fallback, a dot for each threshold."""
    titles = {"log_prob": "mean log-probability under the target", "same": "share of the greedy text's tokens"}
    figure, axes = panels(list(titles.values()), 3.4)
    found = summaries()
    ways = dict.fromkeys((fallback, dropped) for _, fallback, dropped in ARMS)
    for axis, name in zip(axes, titles, strict=True):
        for (fallback, dropped), colour in zip(ways, COLOURS, strict=False):
            own = [one for one in found if one.arm[1:] == (fallback, dropped)]
            points = [(one.speed_up, getattr(one, name)) for one in own]
            label = f"fallback {fallback:g}{', doubtful token dropped' * dropped}"
            axis.plot(*zip(*points, strict=True), "o--" if dropped else "o-", color=colour, markersize=4, label=label)
            for one, point in zip(own, points, strict=True):
                axis.annotate(f"{one.arm[0]:g}", point, (3, 3), textcoords="offset points", fontsize=7)
        (exact,) = [one for one in found if one.arm == EXACT]
        axis.plot([exact.speed_up], [getattr(exact, name)], "*", color=COLOURS[-1], markersize=9, label=EXACT)
        axis.set_xlabel("speed-up over plain decoding")
    figure.suptitle("BiLD on the embedded pair (lossy): numbers are thresholds in nats", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure six more prompts before")
    if parser.parse_args().measure:
        measure()
    PAGE.write_text(with_table(PAGE.read_text()))
    save(curves, PICTURE)

"""Show that the planner is never much slower than plain decoding, and near the best tree where drafts pay.

    python benchmarks/planner.py --tokens 96 --repeats 2
    python benchmarks/planner.py --settings good useless --tokens 96 --fresh

Every text is written by plain decoding and by the planner side by side: whoever has written least takes the next step,
so that a machine whose speed drifts meets all alike. The good pair also writes it with every fixed tree that the
planner knows. One planner serves all texts of a setting, as it would in a program; with --fresh every text gets one
that knows nothing. Before anything counts, each arm writes a few tokens, since the first pass of a new shape is slow.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import polydraft
from polydraft.cli.demo import demo_prompts, describe_machine
from polydraft.engine import Planner, Run, as_drafter
from polydraft.engine.defaults import default_policy
from polydraft.engine.planner import ARMS, SAMPLED_ARMS
from polydraft.probs import SamplingParams
from polydraft.trees import TreePolicy

Settings = dict[str, Any]
Arm = Callable[[], TreePolicy]
PLAIN, PLANNER = "plain decoding", "planner"


def shuffled(model: nn.Module) -> nn.Module:
    """Return a copy of a draft model with random weights: it costs as much and knows nothing."""
    twin, stream = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.copy_(weight.flatten()[torch.randperm(weight.numel(), generator=stream)].view_as(weight))
    return twin


def slow(model: nn.Module) -> nn.Module:
    """Return a copy of the target with noise: as slow as the target, and right now and then."""
    twin, stream = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.add_(0.3 * weight.std() * torch.randn(weight.shape, generator=stream))
    return twin


def settings_of(pair: polydraft.Pair) -> dict[str, Settings]:
    """Return the settings by name; sampling is from the whole distribution."""
    draft = pair.draft
    assert draft is not None
    cold, warm = {"temperature": 0.0}, {"temperature": 1.0, "top_k": 0, "seed": 7}
    return {
        "useless draft, temperature 0": {"drafter": shuffled(draft), **cold},
        "useless draft, temperature 1": {"drafter": shuffled(draft), **warm},
        "draft as slow as the target": {"drafter": slow(pair.target), **cold},
        "temperature 1.5": {"drafter": draft, **warm, "temperature": 1.5},
        "batch 16, temperature 1": {"drafter": draft, **warm, "batch": 16},
        "good pair, temperature 0": {"drafter": draft, **cold},
        "good pair, temperature 1": {"drafter": draft, **warm},
    }


def batches(pair: polydraft.Pair, size: int) -> list[Settings]:
    texts = demo_prompts()
    groups = [[text] for text in texts] if size == 1 else [(texts * size)[:size]]
    rows = [[torch.tensor(pair.tokenizer(text)["input_ids"]) for text in group] for group in groups]
    return [
        {
            "input_ids": pad_sequence(group, batch_first=True, padding_side="left"),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in group], True, padding_side="left"),
        }
        for group in rows
    ]


def known_trees(options: Settings) -> tuple[TreePolicy, ...]:
    """Return the trees that a planner chooses from."""
    return SAMPLED_ARMS if options["temperature"] else ARMS


def fixed_trees(options: Settings) -> tuple[TreePolicy, ...]:
    """Return the trees that a planner is compared with: its own, and the default."""
    usual = default_policy(as_drafter(options["drafter"]), SamplingParams(options["temperature"]))
    return (*known_trees(options), usual)


@dataclass
class Lane:
    """A text in progress: its blocks, what was written and the seconds that it took."""

    run: Run
    seconds: float
    over: bool = False

    @classmethod
    def begin(cls, pair: polydraft.Pair, inputs: Settings, options: Settings) -> "Lane":
        begin = time.perf_counter()
        run = polydraft.stream(pair.target, eos_token_id=None, **inputs, **options)
        return cls(run, time.perf_counter() - begin)

    def step(self) -> None:
        begin = time.perf_counter()
        self.over = next(self.run, None) is None
        self.seconds += time.perf_counter() - begin

    @property
    def written(self) -> int:
        return self.run.statistics.new_tokens


def side_by_side(lanes: list[Lane]) -> list[float]:
    """Write all texts, the shortest first at every step; return each one's tokens per second."""
    while going := [lane for lane in lanes if not lane.over]:
        min(going, key=lambda lane: lane.written).step()
    return [lane.written / lane.seconds for lane in lanes]


def speeds(
    pair: polydraft.Pair, options: Settings, batch: int, arms: dict[str, Arm], repeats: int
) -> dict[str, list[float]]:
    """Return each arm's tokens per second, a value for each text and repeat."""
    sides = {PLAIN: lambda: {"drafter": polydraft.NoDraft()}} | {
        name: lambda make=make: {"policy": make()} for name, make in arms.items()
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    texts = batches(pair, batch)
    for tree in (None, *known_trees(options)):
        few = {**options, "max_new_tokens": 8, **({"policy": tree} if tree else sides[PLAIN]())}
        side_by_side([Lane.begin(pair, texts[0], few)])
    for number, inputs in enumerate(texts * repeats):
        order = list(sides)
        order = order[number % len(order) :] + order[: number % len(order)]
        own = {"seed": options["seed"] + number} if "seed" in options else {}  # luck must not be the same twice
        lanes = [Lane.begin(pair, inputs, {**options, **own, **sides[name]()}) for name in order]
        for name, speed in zip(order, side_by_side(lanes), strict=True):
            found[name].append(speed)
    return found


def table_of(title: str, found: dict[str, list[float]]) -> Table:
    """Compare every arm with plain decoding and with the best of the fixed trees, text by text."""
    trees = [name for name in found if name not in (PLAIN, PLANNER)]
    best = max(trees, key=lambda name: sum(1 / speed for speed in found[name]) ** -1, default=None)
    table = Table(title=title)
    columns = ("arm", "tokens/s", "against plain, median", "smallest", "largest", "against the best tree", "texts")
    for column in columns:
        table.add_column(column, justify="left" if column == "arm" else "right")
    for name, values in found.items():
        ratios = [value / plain for value, plain in zip(values, found[PLAIN], strict=True)]
        beside = [value / other for value, other in zip(values, found[best], strict=True)] if best else []
        table.add_row(
            name,
            f"{len(values) / sum(1 / value for value in values):.1f}",
            f"{median(ratios):.3f}x",
            f"{min(ratios):.2f}",
            f"{max(ratios):.2f}",
            f"{median(beside):.3f}x" if beside else "",
            str(len(values)),
        )
    return table


def words(tree: TreePolicy) -> str:
    """Name a tree by the numbers of its nodes at each depth."""
    return f"tree {', '.join(str(sum(level)) for level in tree.shape.counts)} by depth"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", default=[], help="only settings whose name contains one of these")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="a new planner for every text")
    given = parser.parse_args()
    pair, console = polydraft.load_pair(), Console(highlight=False)
    console.print(
        f"{given.tokens} new tokens, {'fresh planners' if given.fresh else 'one planner'}, {describe_machine()}"
    )
    for name, one in settings_of(pair).items():
        if given.settings and not any(word in name for word in given.settings):
            continue
        shared = Planner()
        arms: dict[str, Arm] = {PLANNER: Planner if given.fresh else lambda planner=shared: planner}
        if name.startswith("good"):
            arms |= {words(tree): lambda tree=tree: tree for tree in fixed_trees(one)}
        options = {"max_new_tokens": given.tokens, **one}
        batch = options.pop("batch", 1)
        found = speeds(pair, options, batch, arms, given.repeats * (1 if batch == 1 else 8))
        console.print(table_of(f"{name}, {len(found[PLAIN])} texts or batches", found))


if __name__ == "__main__":
    main()

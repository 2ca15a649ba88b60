"""Show that the planner is never much slower than plain decoding, and near the best tree where drafts pay.

    python benchmarks/planner.py
    python benchmarks/planner.py --settings good useless --tokens 96 --repeats 2

Every setting pairs plain decoding with the planner on the same prompts, alternating which goes first; the good pair
also with every fixed tree the planner knows. One planner serves all texts of a setting, as it would in a program.
"""

import argparse
import copy
import time
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import polydraft
from polydraft.cli.demo import demo_prompts, describe_machine
from polydraft.engine import Planner
from polydraft.engine.planner import ARMS
from polydraft.trees import TreePolicy

Settings = dict[str, Any]


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


def speed(pair: polydraft.Pair, inputs: Settings, options: Settings) -> float:
    """Return tokens per second of the whole call."""
    begin = time.perf_counter()
    run = polydraft.stream(pair.target, eos_token_id=None, **inputs, **options).exhaust()
    return run.statistics.new_tokens / (time.perf_counter() - begin)


def ratios(
    pair: polydraft.Pair, options: Settings, batch: int, arms: dict[str, TreePolicy], repeats: int
) -> dict[str, list[float]]:
    """Return the arms' speeds over that of plain decoding, a value for each pair of runs."""
    plain = {**options, "drafter": polydraft.NoDraft()}
    found: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(repeats):
        for inputs in batches(pair, batch):
            for name, policy in arms.items():
                sides = [plain, {**options, "policy": policy}]
                speeds = {side: speed(pair, inputs, sides[side]) for side in ((0, 1) if number % 2 else (1, 0))}
                found[name].append(speeds[1] / speeds[0])
    return found


def table_of(title: str, found: dict[str, list[float]]) -> Table:
    table = Table(title=title)
    for column in ("arm", "against plain decoding, median of pairs", "smallest", "largest", "pairs"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for name, values in found.items():
        table.add_row(name, f"{median(values):.3f}x", f"{min(values):.2f}", f"{max(values):.2f}", str(len(values)))
    return table


def words(tree: TreePolicy) -> str:
    return f"tree {', '.join(str(sum(level)) for level in tree.shape.counts)} by depth"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", default=[], help="only settings whose name contains one of these")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    pair, console = polydraft.load_pair(), Console(highlight=False)
    console.print(f"{given.tokens} new tokens, {describe_machine()}")
    chosen = {
        name: one
        for name, one in settings_of(pair).items()
        if not given.settings or any(word in name for word in given.settings)
    }
    for name, one in track(chosen.items(), "settings", transient=True):
        arms: dict[str, TreePolicy] = {"planner": Planner()}
        if name.startswith("good"):
            arms |= {words(tree): tree for tree in ARMS}
        options = {"max_new_tokens": given.tokens, **one}
        found = ratios(pair, options, options.pop("batch", 1), arms, given.repeats)
        console.print(table_of(name, found))


if __name__ == "__main__":
    main()

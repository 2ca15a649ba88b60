"""Measure block efficiency and speed by batch size: drafts against plain decoding of the same batch size.

    python benchmarks/batches.py
    python benchmarks/batches.py --sizes 1 4 --prompts 4 --tokens 16 --temperatures 0.8 --json

Every text accepts its own number of drafts at every step, so that tokens per call do not depend on the batch size.
Where the rows of a batch have to accept alike they fall to what the least lucky row accepts. The column "in step" says
how far, for comparison: batches of the prompts in their order, each step of which gains all rows the smallest of what
they gained at this step of their own, until the first text ends. It is computed from the texts alone.

Both arms run `generate_many` on the same prompts with the same seed, alternating which goes first. Tokens per second
are those of whole runs, with the prompts' passes and the batch that empties at the end, the median over the repeats;
the speed-up is the median of the paired ratios. "same texts" counts those that are as in the first batch size: only
rounding can make a difference.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import polydraft
from polydraft import Completed, ManyRun, NoDraft, generate_many
from polydraft.bench import read_prompts
from polydraft.cli.demo import describe_machine
from polydraft.engine import stream

SEED = 1


@dataclass(frozen=True)
class Result:
    """One line of the table: a temperature and a batch size, drafts against plain decoding."""

    temperature: float
    batch_size: int
    block_efficiency: float
    in_step: float
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float
    slowest: float
    fastest: float
    same_texts: int
    texts: int


def prompts_of(pair: polydraft.Pair, source: str, count: int) -> list[Tensor]:
    """Return the first prompts of a set as token ids, on the target's device."""
    found = [one.text for one in read_prompts(source)[:count]]
    return [torch.tensor(pair.tokenizer(text)["input_ids"], device=pair.target.device) for text in found]


def measured(
    pair: polydraft.Pair, prompts: Sequence[Tensor], size: int, options: dict[str, Any]
) -> tuple[ManyRun, list[Completed]]:
    """Run all prompts; return the run and the texts in the prompts' order."""
    run = generate_many(pair.target, prompts, batch_size=size, seed=SEED, **options)
    return run, sorted(run, key=lambda one: int(str(one.name)))


def gains_alone(
    pair: polydraft.Pair, prompts: Sequence[Tensor], texts: Sequence[Completed], options: dict[str, Any]
) -> list[list[int]]:
    """Return for every text the tokens that it gains at each step."""
    return [
        [len(block.rows[0].tokens) for block in stream(pair.target, prompt.unsqueeze(0), seed=text.seed, **options)]
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def in_step(gains: Sequence[Sequence[int]], size: int) -> float:
    """Return the tokens per row and step of batches in which every row gains what the least lucky one does."""
    batches = [gains[first : first + size] for first in range(0, len(gains), size)]
    steps = [[min(step) for step in zip(*batch, strict=False)] for batch in batches if len(batch) == size]
    return sum(map(sum, steps)) / sum(map(len, steps))


def results(given: argparse.Namespace, pair: polydraft.Pair, console: Console) -> Iterator[Result]:
    """Measure every temperature and batch size, with a progress bar."""
    prompts = prompts_of(pair, given.source, given.prompts)
    sizes = [size for size in given.sizes if size <= len(prompts)]
    bar = iter(track(range(len(sizes) * len(given.temperatures)), "batches", transient=True, console=console))
    for heat in given.temperatures:
        options: dict[str, Any] = {"max_new_tokens": given.tokens, "temperature": heat, "drafter": pair.draft}
        options |= {"top_k": 0} if heat else {}
        gains: list[list[int]] = []
        usual: list[list[int]] = []
        for size in sizes:
            next(bar)
            pairs = [paired(pair, prompts, size, options, turn) for turn in range(given.repeats)]
            run, texts = pairs[-1][1]
            gains = gains or gains_alone(pair, prompts, texts, options)
            usual = usual or [text.tokens for text in texts]
            speeds = [(base.statistics.tokens_per_second, one.statistics.tokens_per_second) for base, (one, _) in pairs]
            ratios = [fast / slow for slow, fast in speeds]
            yield Result(
                heat,
                size,
                run.statistics.block_efficiency,
                in_step(gains, size),
                median(fast for _, fast in speeds),
                median(slow for slow, _ in speeds),
                median(ratios),
                min(ratios),
                max(ratios),
                sum(text.tokens == other for text, other in zip(texts, usual, strict=True)),
                len(texts),
            )


def paired(
    pair: polydraft.Pair, prompts: Sequence[Tensor], size: int, options: dict[str, Any], turn: int
) -> tuple[ManyRun, tuple[ManyRun, list[Completed]]]:
    """Run both arms, at first after a short warm-up; return plain decoding's run, and the drafts' with its texts."""
    arms = ({**options, "drafter": NoDraft()}, options)
    if turn == 0:
        for arm in arms:
            measured(pair, prompts[:size], size, {**arm, "max_new_tokens": 4})
    done = [measured(pair, prompts, size, arm) for arm in (arms if turn % 2 == 0 else arms[::-1])]
    plain, drafted = done if turn % 2 == 0 else done[::-1]
    return plain[0], drafted


def show(console: Console, found: Sequence[Result], given: argparse.Namespace) -> None:
    table = Table(title=f"{given.prompts} prompts of {given.source}, {given.tokens} tokens, {describe_machine()}")
    columns = ("T", "batch", "tokens/call", "in step", "tokens/s", "plain", "speed-up", "range", "same texts")
    for column in columns:
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(
            f"{one.temperature:g}",
            str(one.batch_size),
            f"{one.block_efficiency:.3f}",
            f"{one.in_step:.2f}",
            f"{one.tokens_per_second:.1f}",
            f"{one.plain_tokens_per_second:.1f}",
            f"{one.speedup:.2f}x",
            f"{one.slowest:.2f} to {one.fastest:.2f}",
            f"{one.same_texts} of {one.texts}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--source", default="humaneval", help="a shipped prompt set or a file")
    parser.add_argument("--target", help="folder or hub name; default: the embedded pair")
    parser.add_argument("--draft", help="folder or hub name of the draft model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON lines and nothing else")
    given = parser.parse_args()
    console = Console(highlight=False, width=120, stderr=given.json)
    places = {"dtype": given.dtype, "device": given.device}
    pair = polydraft.load(given.target, given.draft, **places) if given.target else polydraft.load_pair(**places)
    found = list(results(given, pair, console))
    if given.json:
        for one in found:
            sys.stdout.write(json.dumps(asdict(one)) + "\n")
    else:
        show(console, found, given)


if __name__ == "__main__":
    main()

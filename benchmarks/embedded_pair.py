"""Measure the embedded pair: plain decoding against Hugging Face's loop, and trees against plain decoding.

    python benchmarks/embedded_pair.py plain --temperature 1 --repeats 5
    python benchmarks/embedded_pair.py trees --temperature 0.8 chain:3 2,1,1 2,2,1

Every comparison is made of paired runs in this process, alternating which side goes first; medians are reported with
the smallest and largest pair.
"""

import argparse
import time
from statistics import median

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import polydraft
from polydraft.catalogue import parse_policy
from polydraft.cli.demo import demo_prompts, describe_machine
from polydraft.engine import compare

CONSOLE = Console(highlight=False)


def encoded(pair: polydraft.Pair) -> list[torch.Tensor]:
    return [torch.tensor([pair.tokenizer(text)["input_ids"]]) for text in demo_prompts()]


def seconds(function) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def plain(pair: polydraft.Pair, temperature: float, tokens: int, repeats: int) -> None:
    """Time `NoDraft` and Hugging Face's own `generate` on the same model; at temperature 0 both write the same text."""
    ratios = []
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    fixed = {"max_new_tokens": tokens, "eos_token_id": None, **sampling}
    for number, ids in enumerate(track(encoded(pair) * repeats, "plain decoding", transient=True)):

        def ours(ids=ids) -> object:
            return polydraft.generate(pair.target, ids, drafter=polydraft.NoDraft(), **fixed)

        def theirs(ids=ids) -> object:
            return pair.target.generate(ids, **fixed)

        order = (ours, theirs) if number % 2 else (theirs, ours)
        times = {function.__name__: seconds(function) for function in order}
        ratios.append(times["theirs"] / times["ours"])
    CONSOLE.print(
        f"NoDraft against Hugging Face generate, temperature {temperature:g}: {median(ratios):.3f}x as fast "
        f"(median of {len(ratios)} pairs, {min(ratios):.2f} to {max(ratios):.2f}), {describe_machine()}"
    )


def trees(pair: polydraft.Pair, names: list[str], temperature: float, tokens: int, repeats: int) -> None:
    """Compare trees with plain decoding."""
    table = Table(title=f"temperature {temperature:g}, {tokens} new tokens, {describe_machine()}")
    for column in ("tree", "block efficiency", "speed-up", "smallest", "largest", "not forward", "acceptance by depth"):
        table.add_column(column)
    for name in track(names, "trees", transient=True):
        options = {"temperature": temperature, "top_k": 0, "seed": 7} if temperature else {"temperature": 0.0}
        drafter = polydraft.NgramDrafter() if name.startswith("ngram:") else pair.draft
        policy = parse_policy(name.removeprefix("ngram:"))
        result = compare(
            pair.target,
            encoded(pair),
            repeats=repeats,
            drafter=drafter,
            policy=policy,
            max_new_tokens=tokens,
            **options,
        )
        parts = result.drafted.seconds
        share = (parts["verify"] + parts["rest"]) / (parts["total"] - parts["prefill"])
        table.add_row(
            name,
            f"{result.drafted.block_efficiency:.2f}",
            f"{result.speedup:.2f}x",
            f"{min(result.speedups):.2f}",
            f"{max(result.speedups):.2f}",
            f"{100 * share:.0f} %",
            " ".join(f"{rate:.2f}" for rate in result.drafted.acceptance_by_depth),
        )
    CONSOLE.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plain", "trees"])
    parser.add_argument("trees", nargs="*", default=["chain:2", "chain:3", "2,1,1", "2,2,1", "3,1,1"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    given = parser.parse_intermixed_args()
    pair = polydraft.load_pair()
    if given.what == "plain":
        plain(pair, given.temperature, given.tokens, given.repeats)
    else:
        trees(pair, given.trees, given.temperature, given.tokens, given.repeats)


if __name__ == "__main__":
    main()

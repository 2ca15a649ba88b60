"""Measure what a step costs after short and long texts, part by part: only attention may grow.

    python benchmarks/contexts.py
    python benchmarks/contexts.py --contexts 256 1024 4096 --tokens 48

Random weights in the shape of the embedded pair, so that the context can be long; medians over steps of one text.
Attention is what the target's pass takes beyond the pass after the shortest text.
"""

import argparse
from statistics import median

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import polydraft
from polydraft.cli.demo import describe_machine
from polydraft.models.packing import pack_linear_layers
from polydraft.trees import Widths

PARTS = ("draft", "target", "verify", "rest", "total")


def random_model(layers: int, width: int, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=3 * width // 2,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        max_position_embeddings=16384,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    pack_linear_layers(model)
    return model


def step_times(target: PreTrainedModel, draft: PreTrainedModel, prompt: Tensor, tokens: int) -> dict[str, float]:
    """Return the median milliseconds of each part of a step."""
    run = polydraft.stream(
        target, prompt, drafter=draft, policy=Widths((3, 2)), temperature=1.0, top_k=0, seed=0, max_new_tokens=tokens
    )
    before, steps = dict[str, float](), list[dict[str, float]]()
    for _ in run:
        now = run.statistics.seconds
        steps.append({name: now[name] - before.get(name, 0.0) for name in PARTS})
        before = now
    return {name: 1e3 * median(step[name] for step in steps[1:]) for name in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    target, draft = random_model(14, 256, 0), random_model(2, 128, 1)
    stream = torch.Generator().manual_seed(0)
    table = Table(title=f"milliseconds a step, tree 3,2, temperature 1, {describe_machine()}")
    for column in ("context", *PARTS):
        table.add_column(column, justify="right")
    for context in track(given.contexts, "contexts", transient=True):
        prompt = torch.randint(8192, (1, context), generator=stream)
        times = step_times(target, draft, prompt, given.tokens)
        table.add_row(str(context), *(f"{times[name]:.2f}" for name in PARTS))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()

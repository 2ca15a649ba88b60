"""What a pass of a target and of its drafts costs, by how many tokens are scored at once and how many are read before.

    python benchmarks/passes.py --target smollm2 --draft self:int8 --draft self:skip=12

Models take turns, width by width, so that a slow drift of the machine meets all alike; medians are printed.
"""

import argparse
import time
from statistics import median

import torch
from rich.console import Console

import polydraft
from polydraft.models import HuggingFaceModel, LanguageModel, draft_model
from polydraft.models.derived import derived
from polydraft.trees import causal_mask


@torch.inference_mode()
def timed(model: LanguageModel, known: int, width: int) -> float:
    """Return the milliseconds of one pass over `width` tokens after `known` ones."""
    cache = model.new_cache(1, known + width)
    starts = torch.tensor([known])
    tokens = torch.randint(0, model.vocab_size, (1, width))
    places = torch.arange(known, known + width).unsqueeze(0)
    mask = causal_mask(torch.tensor([known + width]), known + width)[:, known:]
    begin = time.perf_counter()
    model.forward(tokens, places, mask, cache, starts)
    first = time.perf_counter() - begin  # reserves the cache
    begin = time.perf_counter()
    model.forward(tokens, places, mask, cache, starts)
    return 1e3 * min(time.perf_counter() - begin, first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", action="append", default=[])
    parser.add_argument("--known", type=int, action="append")
    parser.add_argument("--width", type=int, action="append")
    parser.add_argument("--repeats", type=int, default=20)
    say = Console(highlight=False).out
    given = parser.parse_args()
    widths = given.width or [1, 2, 4, 8, 16, 32, 64]
    target = polydraft.load(given.target).target
    models: dict[str, LanguageModel] = {"target": HuggingFaceModel(target)}
    models |= {word: draft_model(derived(target, word)) for word in given.draft}
    say(f"{torch.get_num_threads()} threads, {target.dtype}; milliseconds, medians of {given.repeats}")
    for known in given.known or [64, 512]:
        say(f"\nafter {known} tokens | " + " | ".join(map(str, widths)))
        times: dict[tuple[str, int], list[float]] = {}
        for _ in range(given.repeats):
            for width in widths:
                for name, model in models.items():
                    times.setdefault((name, width), []).append(timed(model, known, width))
        for name in models:
            say(f"{name} | " + " | ".join(f"{median(times[name, width]):.1f}" for width in widths))


if __name__ == "__main__":
    main()

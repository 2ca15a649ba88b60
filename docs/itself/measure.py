"""Measure views of SmolLM2 behind texts of several lengths, and write the tables of docs/itself.md from the record.

    python docs/itself/measure.py --prompts book.txt other.txt --known 1024 --temperature 0   # a burst of a minute
    python docs/itself/measure.py --prompts book.txt --known 8000 --seconds 300                # the context has 8,192
    python docs/itself/measure.py --prompts book.txt --known 1024 --batch 4                    # four pieces at once
    python docs/itself/measure.py                                                              # tables and figure

Needs `polydraft fetch smollm2`, and `pip install ".[figures]"` for docs/pictures/itself.svg. A burst reads one piece of
one text once and writes behind it with all arms in turn, again and again until its time is up; it is appended to
docs/itself/record.jsonl. The clock runs from the prompt's end. Every round has a plain text of its own, beside which
its other texts are timed. A past is of one row: in a batch every arm reads the pieces itself, which is not counted.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import polydraft
from polydraft.bench.environment import load, machine, versions
from polydraft.bench.style import COLOURS, panels, save

DOCS = Path(__file__).parents[1]
RECORD, PAGE, PICTURE = DOCS / "itself" / "record.jsonl", DOCS / "itself.md", DOCS / "pictures" / "itself.svg"
MARKS = "<!-- table: itself -->\n", "<!-- end of table -->"
NEW, CHAIN, RESAMPLES = 48, 4, 2000
PLAIN, READER = "plain", "self:int8,keys=snap:512"
"""The first is what others are compared with; the second reads the prompt, since it keeps what choices of keys need."""
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {"drafter": "none"},
    "lookup": {"drafter": "ngram"},
    "smollm2-head": {"drafter": "smollm2-head"},
    "self:int8": {"drafter": "self:int8", "policy": CHAIN},
    "self:int8, planned": {"drafter": "self:int8", "policy": "auto"},
    "self:int8,keys=recent:16+240": {"drafter": "self:int8,keys=recent:16+240", "policy": CHAIN},
    READER: {"drafter": READER, "policy": CHAIN},
    "self:keys=snap:512": {"drafter": "self:keys=snap:512", "policy": CHAIN},
    "self:skip-mlp=10-12": {"drafter": "self:skip-mlp=10-12", "policy": CHAIN},
    "self:exit=28": {"drafter": "self:exit=28", "policy": CHAIN},
}
Line = dict[str, Any]


def measured(
    pair: Any, text: str, known: int, temperature: float, seconds: float, seed: int, batch: int
) -> Iterator[Line]:
    """Write behind pieces of a text with all arms in turn until the time is up; yield a line for each turn of one."""
    tokens = pair.tokenizer(text, return_tensors="pt")["input_ids"]
    chosen, last = random.Random(seed), max(1, tokens.shape[1] - known)
    prompt = torch.cat([tokens[:, first : first + known] for first in (chosen.randrange(last) for _ in range(batch))])
    common: Line = {"temperature": temperature, "eos_token_id": pair.target.config.vocab_size}
    if batch == 1:
        begun: Any = polydraft.generate(pair.target, prompt, **common, **ARMS[READER], max_new_tokens=1, keep_past=True)
        common["past"] = begun.past
    common["max_new_tokens"] = NEW
    for options in ARMS.values():
        polydraft.stream(pair.target, prompt, **{**common, **options, "max_new_tokens": 8}).exhaust()
    began, turn, took = perf_counter(), 0, 0.0
    while not turn or perf_counter() - began + took < seconds:
        before = perf_counter()
        for arm, options in ARMS.items():
            run = polydraft.stream(pair.target, prompt, **common, **options, seed=seed + turn).exhaust()
            found, written = run.statistics, run.new_tokens
            yield {
                "known": known,
                "batch": batch,
                "temperature": temperature,
                "turn": turn,
                "arm": arm,
                "seconds": round(found.seconds["total"] - found.seconds["prefill"], 5),
                "drafting": round(found.seconds["draft"], 5),
                "calls": found.target_calls,
                "drafted": found.drafted,
                "tokens": sum(map(len, written)),
                "mark": sum((place + 1) * token for own in written for place, token in enumerate(own)),
            }
        turn, took = turn + 1, perf_counter() - before


def measure(prompts: Sequence[Path], known: int, temperature: float, seconds: float, batch: int) -> None:
    """Append one burst to the record; each takes the next text, and a piece of its own."""
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    burst = sum("machine" in json.loads(line) for line in lines)
    pair = polydraft.load("smollm2")
    before, texts = load(), [one.read_text(encoding="utf-8") for one in prompts]
    found = [*measured(pair, texts[burst % len(texts)], known, temperature, seconds, burst, batch)]
    told = {"burst": burst, "machine": machine(pair.target.device), "load": [before, load()], **versions()}
    told["text"] = prompts[burst % len(texts)].name
    lines += map(json.dumps, [told, *({"burst": burst, **one} for one in found)])
    RECORD.write_text("\n".join(lines) + "\n")


def record() -> tuple[list[Line], list[Line]]:
    """Return what was said of bursts, and the texts."""
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()]
    return [one for one in lines if "machine" in one], [{"batch": 1, **one} for one in lines if "machine" not in one]


def speed_ups(texts: Sequence[Line], arm: str) -> list[float]:
    """Return an arm's speed-up in every round, over the plain text of the same round."""
    seconds = {(one["burst"], one["turn"]): one["seconds"] for one in texts if one["arm"] == PLAIN}
    return [seconds[one["burst"], one["turn"]] / one["seconds"] for one in texts if one["arm"] == arm]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95 % interval for the median, by resampling rounds."""
    stream = random.Random(1)
    found = sorted(median(stream.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return found[RESAMPLES // 40], found[-1 - RESAMPLES // 40]


def cells(texts: Sequence[Line], arm: str) -> list[str]:
    """Return an arm's cells of a table."""
    own = [one for one in texts if one["arm"] == arm]
    rate = f"{median(one['tokens'] / one['seconds'] for one in own):.1f}"
    if arm == PLAIN:
        return [rate, "1", "1"]
    found = speed_ups(texts, arm)
    per_call = sum(one["tokens"] for one in own) / sum(one["calls"] for one in own)
    low, high = interval(found)
    return [rate, f"{median(found):.2f}x ({low:.2f} to {high:.2f})", f"{per_call:.2f}"]


def tables() -> str:
    """Return a table for every number of known tokens, and the conditions."""
    bursts, texts = record()
    made = list[str]()
    for batch, known in sorted({(one["batch"], one["known"]) for one in texts}):
        mine = [one for one in texts if (one["batch"], one["known"]) == (batch, known)]
        temperatures = sorted({one["temperature"] for one in mine})
        of = {T: [one for one in mine if one["temperature"] == T] for T in temperatures}
        rounds = {T: len(speed_ups(own, PLAIN)) for T, own in of.items()}
        counts = " and ".join(f"{rounds[T]} at T = {T:g}" for T in temperatures)
        head = [f"T = {T:g}: tokens/s | speed-up | tokens per call" for T in temperatures]
        columns = " | ".join(["arm", *head])
        rows = f" in each of {batch} rows" if batch > 1 else ""
        made += [f"\n{known:,} known tokens{rows}, rounds: {counts}.\n\n| {columns} |\n"]
        made += ["|" + "---|" * (1 + 3 * len(temperatures)) + "\n"]
        for arm in ARMS:
            row = [cell for own in of.values() for cell in cells(own, arm)]
            made += [f"| {' | '.join([arm if arm == PLAIN else f'`{arm}`', *row])} |\n"]
    loads = [value for one in bursts for value in one["load"]]
    (first, *_) = bursts
    own = first["machine"]
    made += [
        f"\n{own['processor']}, {own['threads']} threads of {own['cores']} cores, torch {first['torch']}, float32; "
        f"load of the machine {min(loads):g} to {max(loads):g}.\n"
    ]
    return "".join(made)


def with_tables(page: str) -> str:
    """Return the page with the tables of the record."""
    head, rest = page.split(MARKS[0])
    return head + MARKS[0] + tables() + MARKS[1] + rest.split(MARKS[1])[1]


def curves() -> Any:
    """Draw speed-up over the known tokens of single texts, a line for each arm, a panel for each temperature."""
    texts = [one for one in record()[1] if one["batch"] == 1]
    temperatures = sorted({one["temperature"] for one in texts})
    figure, axes = panels([f"T = {T:g}" for T in temperatures], 3.6, sharey=True)
    lengths, others = sorted({one["known"] for one in texts}), iter(("dimgrey", "darkgrey"))
    arms = [arm for arm in ARMS if arm != PLAIN]
    colours = dict(zip([arm for arm in arms if arm.startswith("self:")], COLOURS, strict=True))
    colours |= {arm: next(others) for arm in arms if arm not in colours}
    for axis, temperature in zip(axes, temperatures, strict=True):
        for arm in arms:
            own = {n: [one for one in texts if (one["known"], one["temperature"]) == (n, temperature)] for n in lengths}
            found = {known: speed_ups(mine, arm) for known, mine in own.items()}
            points = [(known, median(one)) for known, one in found.items() if one]
            style = "o-" if arm.startswith("self:") else "s--"
            axis.plot(*zip(*points, strict=True), style, color=colours[arm], markersize=4, label=arm)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{one}" if one < 1000 else f"{one // 1000}k" for one in lengths])
        axis.set_xlabel("known tokens")
    axes[0].set_ylabel("speed-up over plain decoding")
    figure.suptitle("Views of SmolLM2-135M, batch 1, two CPU cores: medians of rounds", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="*", type=Path, default=[])
    parser.add_argument("--known", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=40.0)
    options = parser.parse_args()
    if options.prompts:
        torch.set_num_threads(2)
        measure(options.prompts, options.known, options.temperature, options.seconds, options.batch)
    if PAGE.exists():
        PAGE.write_text(with_tables(PAGE.read_text()))
        save(curves, PICTURE)

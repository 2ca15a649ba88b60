"""Measure views of SmolLM2 behind texts of several lengths, and write docs/itself.md's tables from the record.

    python docs/itself/measure.py --prompts book.txt other.txt --known 1024   # a burst of a minute or two
    python docs/itself/measure.py --prompts book.txt --known 8000 --seconds 300                # the context has 8,192
    python docs/itself/measure.py --prompts book.txt --known 1024 --batch 4                    # four pieces at once
    python docs/itself/measure.py --prompts book.txt --known 1024 --memory                     # the most memory of each
    python docs/itself/measure.py --prompts book.txt --known 1024 --whole                      # reading included
    python docs/itself/measure.py --prompts book.txt --known 1024 --others                     # more views, and stacks
    python docs/itself/measure.py                                                              # tables and figure

Needs `polydraft fetch smollm2`, and `pip install ".[figures]"` for docs/pictures/itself.svg. A burst reads one piece of
one text once and writes behind it with all arms in turn, again and again until its time is up; it is appended to
docs/itself/record.jsonl. The clock runs from the prompt's end. Every round has a plain text of its own, beside which
its other texts are timed. In a batch, a running one keeps the pieces between the arms, as a server does; joining is not
counted.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median
from time import perf_counter
from typing import Any

import torch

import polydraft
from polydraft.bench.environment import load, machine, versions
from polydraft.bench.style import COLOURS, panels, save
from polydraft.engine.choices import chosen_drafter
from polydraft.engine.generate import target_model
from polydraft.engine.many.prompt_reading import KeptTexts

DOCS = Path(__file__).parents[1]
RECORD, PICTURE = DOCS / "itself" / "record.jsonl", DOCS / "pictures" / "itself.svg"
PAGE, SUMMARY = DOCS / "itself" / "tables.md", DOCS / "itself.md"
MARKS = "<!-- table: itself -->\n", "<!-- end of table -->"
NEW, CHAIN, RESAMPLES = 48, 4, 2000
DRAWN = 1, 4
"""The batches of the figure."""
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
OTHERS: dict[str, dict[str, Any]] = {
    "self:int8,keys=chunks:512/8": {"drafter": "self:int8,keys=chunks:512/8", "policy": CHAIN},
    "self:int8,keys=mass:512": {"drafter": "self:int8,keys=mass:512", "policy": CHAIN},
    "self:skip=auto": {"drafter": "self:skip=auto", "policy": CHAIN},
    "self:int8 < ngram": {"drafter": "self:int8 < ngram", "policy": CHAIN},
    "self:int8,keys=recent:16+240 < ngram": {"drafter": "self:int8,keys=recent:16+240 < ngram", "policy": CHAIN},
    "self:keys=chunks:512/8 < ngram": {"drafter": "self:keys=chunks:512/8 < ngram", "policy": CHAIN},
    "self:int8@2 ngram@6": {"drafter": "self:int8@2 ngram@6", "policy": 8},
}
"""More views, and stacks of drafts: measured by `--others`, in rounds of their own."""
EVERY = ARMS | OTHERS
WHOLE = PLAIN, "self:int8", "self:int8, planned", "self:int8,keys=recent:16+240", READER, "smollm2-head"
"""The arms of which whole calls are timed."""
READERS = READER, "self:keys=snap:512", "smollm2-head"
"""These note what the target's passes tell beside its keys."""
Line = dict[str, Any]
Written = tuple[float, Any, list[list[int]]]
"""Seconds, statistics and the new tokens of each row."""
Writer = Callable[[str, float, int, int], Written]
"""Writes with an arm, at a temperature, with a seed, so many tokens."""


def measured(pair: Any, text: str, arms: Sequence[str], options: argparse.Namespace, seed: int) -> Iterator[Line]:
    """Write behind pieces of a text with arms in turn until the time is up; yield a line for each turn of one."""
    known, batch = options.known, options.batch
    tokens = pair.tokenizer(text, return_tensors="pt")["input_ids"]
    chosen, last = random.Random(seed), max(1, tokens.shape[1] - known)
    prompt = torch.cat([tokens[:, first : first + known] for first in (chosen.randrange(last) for _ in range(batch))])
    write = (alone if batch == 1 else together)(pair.target, prompt)
    for arm in arms:
        write(arm, options.temperature[0], 0, 8)
    began, turn, took = perf_counter(), 0, 0.0
    while not turn or perf_counter() - began + took < options.seconds:
        before = perf_counter()
        for temperature, arm in product(options.temperature, arms):
            spent, found, written = write(arm, temperature, seed + turn, NEW)
            yield {
                "known": known,
                "batch": batch,
                "temperature": temperature,
                "turn": turn,
                "arm": arm,
                "seconds": round(spent, 5),
                "drafting": round(found.seconds["draft"], 5),
                "calls": found.target_calls,
                "drafted": found.drafted,
                "tokens": sum(map(len, written)),
                "mark": sum((place + 1) * token for own in written for place, token in enumerate(own)),
            }
        turn, took = turn + 1, perf_counter() - before


def endless(target: Any, temperature: float, count: int) -> Line:
    """Return options for texts of just so many tokens."""
    return {"temperature": temperature, "eos_token_id": target.config.vocab_size, "max_new_tokens": count}


def alone(target: Any, prompt: torch.Tensor) -> Writer:
    """Return who writes one text behind a prompt that was read once."""
    begun: Any = polydraft.generate(target, prompt, **endless(target, 0.0, 1), **EVERY[READER], keep_past=True)

    def write(arm: str, temperature: float, seed: int, count: int) -> Written:
        options = endless(target, temperature, count) | EVERY[arm]
        run = polydraft.stream(target, prompt, **options, past=begun.past, seed=seed).exhaust()
        took = run.statistics.seconds
        return took["total"] - took["prefill"], run.statistics, run.new_tokens

    return write


def together(target: Any, prompts: torch.Tensor) -> Writer:
    """Return who writes texts beside each other in a running batch that keeps their prompts from arm to arm."""
    kept, drafters = KeptTexts(2 * len(prompts)), dict[str, Any]()

    def write(arm: str, temperature: float, seed: int, count: int) -> Written:
        options = {**endless(target, temperature, count), **EVERY[arm], "seed": seed, "batch_size": len(prompts)}
        if arm in READERS:  # the state of a text belongs to one drafter
            options["drafter"] = drafters.setdefault(arm, chosen_drafter(options["drafter"], target_model(target)))
        run: Any = polydraft.generate_many(target, list(prompts), **options)
        batch, joining, before = run._batch, list[float](), perf_counter()  # noqa: SLF001
        batch._kept, join = kept, batch.join  # noqa: SLF001

        def timed(*request: Any) -> None:
            began = perf_counter()
            join(*request)
            joining.append(perf_counter() - began)

        batch.join = timed
        texts = sorted(run, key=lambda text: text.name)
        del batch.join  # else the batch would hold itself
        return perf_counter() - before - sum(joining), run.statistics, [text.tokens for text in texts]

    return write


def measure(options: argparse.Namespace) -> None:
    """Append one burst to the record; each takes the next text, and a piece of its own."""
    prompts, arms = options.prompts, [PLAIN, *OTHERS] if options.others else list(ARMS)
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    burst = sum("machine" in json.loads(line) for line in lines)
    pair = polydraft.load("smollm2")
    before, texts = load(), [one.read_text(encoding="utf-8") for one in prompts]
    found = [*measured(pair, texts[burst % len(texts)], arms, options, burst)]
    told = {"burst": burst, "machine": machine(pair.target.device), "load": [before, load()], **versions()}
    told["text"] = prompts[burst % len(texts)].name
    lines += map(json.dumps, [told, *({"burst": burst, **one} for one in found)])
    RECORD.write_text("\n".join(lines) + "\n")


def peak(text: str, known: int, batch: int, arm: str) -> float:
    """Write with an arm, and return the most memory that this process has had, in MB."""
    pair = polydraft.load("smollm2")
    tokens = pair.tokenizer(text, return_tensors="pt")["input_ids"][0]
    prompts = [tokens[row * known : (row + 1) * known] for row in range(batch)]
    list(polydraft.generate_many(pair.target, prompts, **endless(pair.target, 0.0, NEW), **EVERY[arm], seed=0))
    return getrusage(RUSAGE_SELF).ru_maxrss / 1e3


def measure_memory(prompt: Path, known: int, batch: int) -> None:
    """Append the most memory of every arm to the record, each in a process of its own."""
    text = prompt.read_text(encoding="utf-8")
    for arm in ARMS:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            found = process.submit(peak, text, known, batch, arm).result()
        with RECORD.open("a") as file:
            print(json.dumps({"known": known, "batch": batch, "arm": arm, "memory": round(found)}), file=file)


def measure_whole(prompts: Sequence[Path], known: int) -> None:
    """Append the seconds of whole calls to the record, the prompt's reading among them: all arms behind one piece."""
    turn = sum((one["known"], one["arm"]) == (known, PLAIN) for one in record()[3])
    pair, text = polydraft.load("smollm2"), prompts[turn % len(prompts)].read_text(encoding="utf-8")
    tokens = pair.tokenizer(text, return_tensors="pt")["input_ids"]
    first = random.Random(turn + known).randrange(max(1, tokens.shape[1] - known))
    for count, ids in ((8, tokens[:, :64]), (NEW, tokens[:, first : first + known])):  # the first is to warm up
        for arm in WHOLE:
            options = endless(pair.target, 0.0, count) | EVERY[arm]
            took = polydraft.stream(pair.target, ids, **options, seed=turn).exhaust().statistics.seconds
            line = {"known": known, "arm": arm, "whole": round(took["total"], 4), "reading": round(took["prefill"], 4)}
            if count == NEW:
                with RECORD.open("a") as file:
                    print(json.dumps(line), file=file)


def record() -> tuple[list[Line], list[Line], list[Line], list[Line]]:
    """Return what was said of bursts, the texts, the most memory of processes, and whole calls."""
    lines: list[Line] = [{"batch": 1, **json.loads(line)} for line in RECORD.read_text().splitlines()]
    apart = [[one for one in lines if key in one] for key in ("machine", "turn", "memory", "whole")]
    return apart[0], apart[1], apart[2], apart[3]


def whole_calls() -> str:
    """Return a table of whole calls by length: the plain one's seconds, and its share of reading; others' speed-ups."""
    lines, made = record()[3], list[str]()
    for known in sorted({one["known"] for one in lines}):
        own = {arm: [one for one in lines if (one["known"], one["arm"]) == (known, arm)] for arm in WHOLE}
        took = {arm: median(one["whole"] for one in some) for arm, some in own.items()}
        share = median(one["reading"] / one["whole"] for one in own[PLAIN])
        gains = " | ".join(f"{took[PLAIN] / took[arm]:.2f}x" for arm in WHOLE if arm != PLAIN)
        made.append(f"| {known:,} | {len(own[PLAIN])} | {took[PLAIN]:.1f} s | {share:.0%} | {gains} |\n")
    others = " | ".join(named(arm) for arm in WHOLE if arm != PLAIN)
    head = f"| known | calls | plain | of it reading | {others} |\n|" + "---|" * (3 + len(WHOLE)) + "\n"
    return f"\nWhole calls at T = 0, the prompt's reading counted.\n\n{head}{''.join(made)}" if made else ""


def speed_ups(texts: Sequence[Line], arm: str) -> list[float]:
    """Return an arm's speed-up in every round, over the plain text of the same round."""
    seconds = {(one["burst"], one["turn"], one["temperature"]): one["seconds"] for one in texts if one["arm"] == PLAIN}
    own = [one for one in texts if one["arm"] == arm]
    return [seconds[one["burst"], one["turn"], one["temperature"]] / one["seconds"] for one in own]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95 % interval for the median, by resampling rounds."""
    stream = random.Random(1)
    found = sorted(median(stream.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return found[RESAMPLES // 40], found[-1 - RESAMPLES // 40]


def cells(texts: Sequence[Line], arm: str) -> list[str]:
    """Return an arm's cells of a table; one round has no interval."""
    own = [one for one in texts if one["arm"] == arm]
    if not own:
        return ["", "", ""]
    rate = f"{median(one['tokens'] / one['seconds'] for one in own):.1f}"
    if arm == PLAIN:
        return [rate, "1", "1"]
    found = speed_ups(texts, arm)
    per_call = sum(one["tokens"] for one in own) / sum(one["calls"] for one in own)
    low, high = interval(found)
    spread = f" ({low:.2f} to {high:.2f})" if len(found) > 1 else ""
    return [rate, f"{median(found):.2f}x{spread}", f"{per_call:.2f}"]


def passes(texts: Sequence[Line], arm: str) -> tuple[str, str]:
    """Return what a level of a chain takes, and verifying it, in plain passes of as many rows; else nothing."""
    own = [one for one in texts if one["arm"] == arm]
    if not own or EVERY[arm].get("policy") != CHAIN:
        return "", ""
    plain = {(one["burst"], one["turn"], one["temperature"]): one for one in texts if one["arm"] == PLAIN}
    found = list[tuple[float, float]]()
    for one in own:
        beside = plain[one["burst"], one["turn"], one["temperature"]]
        whole = beside["seconds"] / beside["calls"]
        verifying = (one["seconds"] - one["drafting"]) / one["calls"]
        found.append((one["drafting"] / one["drafted"] / whole, verifying / whole))
    level, verifying = (median(one[part] for one in found) for part in (0, 1))
    return f"{level:.2f}", f"{verifying:.2f}"


def by_place(texts: Sequence[Line]) -> dict[tuple[int, int], dict[float, list[Line]]]:
    """Return texts by rows, known tokens and temperature."""
    found = dict[tuple[int, int], dict[float, list[Line]]]()
    for one in sorted(texts, key=lambda one: (one["batch"], one["known"], one["temperature"])):
        found.setdefault((one["batch"], one["known"]), {}).setdefault(one["temperature"], []).append(one)
    return found


def named(arm: str) -> str:
    """Return an arm as a table names it."""
    return arm if arm == PLAIN else f"`{arm}`"


def tables() -> str:
    """Return a table for every number of rows and of known tokens, and the conditions."""
    bursts, texts, memory, _ = record()
    made = list[str]()
    for (batch, known), of in by_place(texts).items():
        counts = " and ".join(f"{len(speed_ups(own, PLAIN))} at T = {T:g}" for T, own in of.items())
        used = {one["arm"]: one["memory"] for one in memory if (one["batch"], one["known"]) == (batch, known)}
        used = used if len(used) == len(ARMS) else {}
        head = [
            "arm",
            *(f"T = {T:g}: tokens/s | speed-up | tokens per call" for T in of),
            "c | v",
            *(["memory"] if used else []),
        ]
        rows = f" in each of {batch} rows" if batch > 1 else ""
        made += [f"\n{known:,} known tokens{rows}, rounds: {counts}.\n\n| {' | '.join(head)} |\n"]
        made += ["|" + "---|" * (1 + 3 * len(of) + 2 + bool(used)) + "\n"]
        every = [one for own in of.values() for one in own]
        for arm in (arm for arm in EVERY if any(one["arm"] == arm for one in every)):
            row = [cell for own in of.values() for cell in cells(own, arm)]
            row += passes(every, arm)
            row += (
                [f"{used[arm]:,} MB" if arm == PLAIN else f"{used[arm] - used[PLAIN]:+,} MB"]
                if arm in used
                else [""] * bool(used)
            )
            made += [f"| {' | '.join([named(arm), *row])} |\n"]
    loads = [value for one in bursts for value in one["load"]]
    (first, *_) = bursts
    own = first["machine"]
    made += [
        f"\n{own['processor']}, {own['threads']} threads of {own['cores']} cores, torch {first['torch']}, float32; "
        f"load of the machine {min(loads):g} to {max(loads):g}.\n"
    ]
    return "".join([*made, whole_calls()])


def summary() -> str:
    """Return a table of speed-ups alone, of the arms that gain somewhere beyond lookups."""
    arms = [arm for arm in ARMS if "int8" in arm]
    made = [f"\n| rows | known | {' | '.join(map(named, arms))} |\n|" + "---|" * (2 + len(arms)) + "\n"]
    for (batch, known), of in by_place(record()[1]).items():
        found = [" and ".join(f"{median(speed_ups(own, arm)):.2f}x" for own in of.values()) for arm in arms]
        made += [f"| {batch} | {known:,} | {' | '.join(found)} |\n"]
    return "".join(made)


def with_table(page: str, table: str) -> str:
    """Return a page with a table between its marks."""
    head, rest = page.split(MARKS[0])
    return head + MARKS[0] + table + MARKS[1] + rest.split(MARKS[1])[1]


def curves() -> Any:
    """Draw speed-up over the known tokens, a line for each arm, a panel for each batch and temperature."""
    every = record()[1]
    places = sorted({(one["batch"], one["temperature"]) for one in every if one["batch"] in DRAWN})
    figure, axes = panels([f"batch {batch}, T = {T:g}" for batch, T in places], 3.6, sharey=True)
    lengths, others = sorted({one["known"] for one in every}), iter(("dimgrey", "darkgrey"))
    arms = [arm for arm in ARMS if arm != PLAIN]
    colours = dict(zip([arm for arm in arms if arm.startswith("self:")], COLOURS, strict=True))
    colours |= {arm: next(others) for arm in arms if arm not in colours}
    for axis, (batch, temperature) in zip(axes, places, strict=True):
        own = {at: of.get(temperature, []) for (rows, at), of in by_place(every).items() if rows == batch}
        for arm in arms:
            points = [(at, median(speed_ups(mine, arm))) for at, mine in own.items() if mine]
            style = "o-" if arm.startswith("self:") else "s--"
            axis.plot(*zip(*points, strict=True), style, color=colours[arm], markersize=4, label=arm)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{one}" if one < 1000 else f"{one // 1000}k" for one in lengths])
        axis.set_xlabel("known tokens")
    axes[0].set_ylabel("speed-up over plain decoding")
    figure.suptitle("Views of SmolLM2-135M, two CPU cores: medians of rounds", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="*", type=Path, default=[])
    parser.add_argument("--known", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--memory", action="store_true", help="the most memory of every arm instead of its time")
    parser.add_argument("--others", action="store_true", help="more views, and stacks, in the place of the usual arms")
    parser.add_argument("--whole", action="store_true", help="whole calls with their prompt's reading, T = 0")
    options = parser.parse_args()
    if options.whole:
        torch.set_num_threads(2)
        measure_whole(options.prompts, options.known)
    elif options.memory:
        measure_memory(options.prompts[0], options.known, options.batch)
    elif options.prompts:
        torch.set_num_threads(2)
        measure(options)
    if PAGE.exists():
        PAGE.write_text(with_table(PAGE.read_text(), tables()))
        SUMMARY.write_text(with_table(SUMMARY.read_text(), summary()))
        save(curves, PICTURE)

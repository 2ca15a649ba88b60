"""Distil one draft from one start in many ways, at equal steps or time, and write docs/alignment/tables.md.

    python docs/alignment/published.py --work FOLDER                     # all that is not in the record yet
    python docs/alignment/published.py --work FOLDER --only losses --steps 100
    python docs/alignment/published.py                                   # the tables alone

The pair is the embedded one. The young start has the shapes of the shipped draft and was trained from nothing by the
cross entropy of Python's own source, as the small member of a family is. `arms.py` has the kinds of text. `transfer` is
judged on questions of school mathematics, behind whose like nobody learnt; `twice` has every second layer of the
target, tuned on its text, as a smaller target. `limit` asks how much the shipped draft can still learn, and what its
width is worth: from it by three losses, and from nothing by one recipe at three widths. `trees` has the losses
for several drafts, and decodes in trees of so many drafts below each node. `smollm2` has that target and
six of its layers as the start. An arm is a line of docs/alignment/published.jsonl; what is there is not run again, and
Ctrl-C between two steps loses no arm but the one that runs.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from arms import (
    DRAFTING,
    FEW_LAYERS,
    HELD,
    IN_TREES,
    IN_TURN,
    LARGER,
    LENGTH,
    SHIPPED,
    TEXTS,
    WIDTHS,
    YOUNG,
    Bench,
    Line,
    Trial,
)

import polydraft

DOCS = Path(__file__).parents[1]
RECORD, PAGE = DOCS / "alignment" / "published.jsonl", DOCS / "alignment" / "tables.md"
MARKS = "<!-- table: published -->\n", "<!-- end of published -->"
DIVERGENCES, SOURCES = ("fkl", "rkl", "jsd", "tvd"), ("fixed", "target", "draft", "both", "by-token")
LOSSES = (
    *("fkl", "jsd", "tvd", "tvd++", "lk-alpha", "lk-alpha-2", "lk-alpha-4", "lk-lambda"),
    *("products", "accepted", "accepted-by-token", "calls", "calls-by-token", "replay"),
)
NEAR = ("jsd", "lk-alpha", "calls", "accepted", "fkl", "tvd", "products", "rkl", "replay")
"""What the draft that ships, which is close to its target, learns on by."""
BOOSTS = ("boost:2", "boost:2:samples", "boost:3", f"boost:2{IN_TURN}", f"boost:3{IN_TURN}")
TEXTS_A_PROMPT = "target", "target:2", "target:4"
COLUMNS = ("loss", "text", "form", "T = 0", "T = 1", "overlap", "alpha* of 2, of 4", "seconds", "speed, T = 0, T = 1")
TREES = "tokens per call in trees of 2, of 4"
SMOLLM2 = "smollm2"


def trials(seeds: Sequence[int]) -> Iterator[Trial]:
    """Yield all arms, those of each experiment behind one another."""
    for seed in seeds:
        for source in SOURCES:
            for loss in DIVERGENCES:
                yield Trial("distillspec", loss, source, seed)
        for loss in DIVERGENCES:
            yield Trial("distillspec", loss, "draft-reached", seed)
        for loss in LOSSES:
            yield Trial("losses", loss, seed=seed)
        for loss in ("jsd", "lk-alpha", "lk-alpha-2", "lk-alpha-4"):
            yield Trial(IN_TREES, loss, seed=seed)
        for loss in ("fkl", "adaspec"):
            yield Trial("adaspec", loss, seed=seed)
        for form in BOOSTS:
            yield Trial("boost", "fkl", seed=seed, form=form)
        for longer in (2, 3):
            yield Trial("boost", "fkl", seed=seed, longer=longer)
        for start in LARGER:
            yield Trial("boost", "fkl", seed=seed, start=start)
        for source in TEXTS_A_PROMPT:
            yield Trial("texts", "jsd", source, seed)
        yield Trial("transfer", "jsd", seed=seed, longer=0)
        for loss in DIVERGENCES:
            yield Trial("transfer", loss, seed=seed)
        yield Trial("twice", "jsd", seed=seed)
        for longer in (0, 1):
            yield Trial("twice", "jsd", "smaller", seed, longer=longer)
        limit = partial(Trial, "limit", seed=seed)
        yield limit("jsd", start=SHIPPED, longer=0)
        for loss in NEAR:
            yield limit(loss, start=SHIPPED)
        for start in WIDTHS:
            yield limit("jsd", start=start)
        yield Trial(SMOLLM2, "jsd", seed=seed, start=FEW_LAYERS, longer=0)
        for loss in DIVERGENCES:
            yield Trial(SMOLLM2, loss, seed=seed, start=FEW_LAYERS)
        for loss in ("jsd", "tvd"):  # with those above the best arms of `distillspec`
            yield Trial(SMOLLM2, loss, "by-token", seed, start=FEW_LAYERS)


def record() -> list[Line]:
    """Return the lines of the record."""
    return [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


def tables() -> str:
    """Return a table of each experiment, the mean over seeds, with the conditions."""
    lines, made = record(), list[str]()
    for name, *asked in dict.fromkeys((line["experiment"], *line["asked"]) for line in lines):
        own = [line for line in lines if line["experiment"] == name and line["asked"] == asked]
        seeds, steps = (", ".join(map(str, sorted({line[one] for line in own}))) for one in ("seed", "steps"))
        made.append(
            f"\n\n**{name}**: {'SmolLM2-135M' if name == SMOLLM2 else 'embedded pair'}; {steps} steps of {TEXTS} texts "
            f"of {LENGTH} tokens, out of {asked[1]:,} of each kind of text; seeds {seeds}; tokens per call of chains "
            f"of five as a block on {HELD} texts at each temperature.\n\n"
            f"| {' | '.join((*COLUMNS[:-1], TREES) if name == IN_TREES else COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
        )
        for key in dict.fromkeys(told(one) for one in own):
            some = [one for one in own if told(one) == key]
            own_seeds = ", ".join(str(one["seed"]) for one in some)
            loss, source, form = key
            form = form if own_seeds == seeds else f"{form}, seed {own_seeds}"
            numbers = [
                *(f"{fmean([one['calls'][heat] for one in some]):.3f}" for heat in "01"),
                f"{fmean([one['overlap'] for one in some]):.3f}",
                optimum_in_words([one["optimum"] for one in some if one["optimum"]]),
                f"{fmean([one['seconds'] for one in some]):.0f}",
                "; ".join(speeds_in_words([one["speed"] for one in some if "speed" in one]))
                or ", ".join(in_trees([one["trees"] for one in some if "trees" in one])),
            ]
            made.append(f"\n| {' | '.join([loss, source, form, *numbers])} |")
    return "".join(made).strip() + "\n"


def optimum_in_words(some: Sequence[dict[str, float]]) -> str:
    """Return the means of alpha*."""
    if not some:
        return ""
    means = {name: f"{fmean([one[name] for one in some]):.3f}" for name in some[0]}
    return f"{means['several']} ({means['in turn']} in turn)" if "several" in means else f"{means['2']}, {means['4']}"


def speeds_in_words(some: Sequence[dict[str, dict[str, list[float]]]]) -> Iterator[str]:
    """Yield the mean speeds at both temperatures with the widest intervals of the seeds."""
    for name in some[0] if some else ():
        words = list[str]()
        for heat in "01":
            middles, *ends = zip(*(one[name][heat] for one in some), strict=True)
            words.append(
                f"{fmean(middles):.2f} [{min(ends[0]):.2f}, {max(ends[1]):.2f}]" if ends else f"{fmean(middles):.0f}"
            )
        own = ", ".join(words)
        yield own if name == "drafted" else f"{own} {name}" if name == DRAFTING else f"{name} {own}"


def in_trees(some: Sequence[dict[str, float]]) -> Iterator[str]:
    """Yield the means over seeds of tokens per call in each kind of tree."""
    for count in some[0] if some else ():
        yield f"{fmean([one[count] for one in some]):.3f}"


def told(line: Line) -> tuple[str, str, str]:
    """Return what an arm is called in a table."""
    longer, source = line["longer"], line["source"]
    form = line["form"] if "start" not in line or line["start"] == YOUNG else line["start"]
    form = form if longer == 1 else f"{form}, {longer} times the steps" if longer else "the start"
    return line["loss"], f"{source}, overlap {line['kept']:.3f}" if "kept" in line else source, form


def main() -> None:
    """Run what is not in the record, and write the tables into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where text, start and checkpoints are; without it nothing is run")
    parser.add_argument("--only", action="append", help="an experiment; may be repeated")
    parser.add_argument("--steps", type=int, default=400, help="of an arm")
    parser.add_argument("--tokens", type=int, default=400_000, help="of each kind of text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    if given.work is not None:
        work = given.work / f"{given.steps}-{given.tokens}"
        done, benches = {one["key"] for one in record()}, dict[str, Bench]()
        for trial in trials(given.seeds):
            key = f"{trial.key} {given.steps} {given.tokens}"
            if key in done or (given.only and trial.experiment not in given.only):
                continue
            name = SMOLLM2 if trial.experiment == SMOLLM2 else "pair"
            if name not in benches:
                pair, folder = (polydraft.load(name), work / name) if name == SMOLLM2 else (None, work)
                benches[name] = Bench(folder, given.tokens, given.steps, pair=pair)
            line = {"key": key, "asked": [given.steps, given.tokens], **benches[name].arm(trial)}
            with RECORD.open("a") as file:
                file.write(json.dumps(line) + "\n")
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    text = PAGE.read_text(encoding="utf-8")
    if all(mark in text for mark in MARKS):
        before, rest = text.split(MARKS[0])
        PAGE.write_text(before + MARKS[0] + tables() + MARKS[1] + rest.split(MARKS[1])[1], encoding="utf-8")


if __name__ == "__main__":
    main()

"""Measure what rules keep of drawn trees on real text, and write the tables of docs/theory/optimum/trees.md.

    python docs/theory/optimum/measure.py --drafts pair                         # some minutes; goes on where it ended
    python docs/theory/optimum/measure.py --drafts smollm2-head --trees 160     # needs `polydraft fetch smollm2`
    python docs/theory/optimum/measure.py                                       # the tables alone

The target writes each text alone. At every position of it trees are drafted, and what each rule keeps of a tree on
average is computed. All rules of a way of drafting see the same trees. A line of docs/theory/optimum/record.jsonl is
all trees of one shape, drawn in one way at one temperature.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import torch
from torch import Tensor

import polydraft
from polydraft.bench.environment import machine, versions
from polydraft.bench.prompts import in_turn, read_prompts
from polydraft.bench.prompts.prompt import encode, seed_of
from polydraft.drafters import Drafter, ModelDrafter
from polydraft.engine import head_for
from polydraft.models import Pair, embedded_head, shipped_head
from polydraft.probs import Noise
from polydraft.schemes import IID, Scheme, TopThenSample
from polydraft.trees import Draft, Fixed, TokenTree, TreeShape, Verdict
from polydraft.trees.tree import topology
from polydraft.verifiers import (
    FAMILIES,
    BlockVerification,
    BottomUp,
    NaiveMatch,
    Optimal,
    PathVerifier,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    TopDown,
    TopThenSampleRule,
    TraversalVerification,
    Valued,
    cross_fitted,
    dual_values,
)

FOLDER = Path(__file__).parent
RECORD, PAGE = FOLDER / "record.jsonl", FOLDER / "trees.md"
MARKS = "<!-- table: trees -->\n", "<!-- end of table -->"
SUBJECTS = {
    "pair": "The embedded pair, Python texts",
    "pair-head": "The embedded target's block head, Python texts",
    "smollm2-head": "SmolLM2's block head, answers to instructions",
}
LISTED = 256
PRICES = FAMILIES[1::3]
"""A third of the families of prices of `polydraft limits`, the damping in the middle: they take most of the time."""
CHAINS = tuple(";".join("1" * length) for length in (3, 4, 5, 6, 8, 12, 15))
SHAPES = (
    "2;1,1",
    "2;1,0",
    "2;2,0",
    "3;1,0,0",
    "2;1,1;1",
    "3;2,1,0",
    "2;1,1;1,1",
    "2;2,0;1,0;1",
    "2;1;1;1;1",
    "3;2,1,0;1,0,0;1",
    "3;2,1,1;2,1,0,0;1,0,0;1",
    "3;2,2,2;1,1,1,1,1,1",
)
BLOCK, DOWN, UP, TRAVERSAL, OURS = "block", "optimal, down", "optimal, up", "traversal", "valued"
RECURSIVE, UNIVER = "recursive", "UniVer"
RULES: dict[str, dict[str, PathVerifier]] = {
    "without": {
        RECURSIVE: TopDown(RecursiveRejectionWithoutReplacement()),
        DOWN: TopDown(Optimal()),
        UP: BottomUp(Optimal()),
        TRAVERSAL: TraversalVerification(),
        OURS: Valued(),
    },
    "independent": {
        RECURSIVE: TopDown(RecursiveRejection()),
        DOWN: TopDown(Optimal(IID())),
        UP: BottomUp(Optimal(IID())),
        TRAVERSAL: TraversalVerification(IID()),
        OURS: Valued(IID()),
    },
    "top": {UNIVER: BottomUp(TopThenSampleRule()), OURS: Valued(TopThenSample())},
    "chain": {BLOCK: BlockVerification()},
}
"""By the way of drafting: the rules; `top` is UniVer's, the top token first, the last one drawn."""
PUBLISHED = (RECURSIVE, DOWN, TRAVERSAL, UNIVER)
Line = dict[str, Any]


def shape_of(word: str) -> TreeShape:
    """Return the shape whose numbers of children are written level by level: 2;1,0."""
    return TreeShape(tuple(tuple(map(int, level.split(","))) for level in word.split(";")))


def widened(shape: TreeShape) -> tuple[TreeShape, list[int]]:
    """Give each leaf above the last depth a child, so that it has a draft row; return the nodes of the shape there."""
    counts, kept, ours, first = list[tuple[int, ...]](), [0], [True], 1
    for level in shape.counts:
        own = iter([*level, *[0] * (sum(ours) - len(level))])
        row, below = list[int](), list[bool]()
        for mine in ours:
            count = next(own) if mine else 0
            row.append(count or int(mine))
            below += [True] * count or [False] * int(mine)
        kept += [first + place for place, mine in enumerate(below) if mine]
        counts.append(tuple(row))
        first, ours = first + len(below), below
    return TreeShape(tuple(counts)), kept


def within(draft: Draft, shape: TreeShape, kept: Sequence[int]) -> Draft:
    """Return the trees of a shape that lie in those widened, with a draft row at every node above the last depth."""
    nodes = torch.tensor(kept)
    tree = TokenTree(draft.tree.tokens[:, nodes], topology(shape, 1, nodes.device), draft.tree.valid[:, nodes])
    parts = {name: getattr(draft, name)[:, nodes] for name in ("atoms", "shortlist", "probs")}
    return replace(draft, tree=tree, **parts, scored=None, planned=shape, most_children=shape.max_children)


def without_rows_at_leaves(draft: Draft) -> Draft:
    """Return the draft as a drafter of its shape would have made it."""
    leaf = (draft.tree.children < 0).all(dim=-1)[..., None]
    return replace(draft, shortlist=draft.shortlist.where(~leaf, -1), probs=draft.probs.where(~leaf, 0.0))


@dataclass(frozen=True, eq=False)
class Looking:
    """A verifier that keeps no draft, so that the text is the target's alone, and notes what rules would keep."""

    rules: dict[str, PathVerifier]
    shape: TreeShape
    positions: int
    name = "looking"
    lossless = True
    kept: dict[str, list[float]] = field(default_factory=dict)
    ms: dict[str, list[float]] = field(default_factory=dict)
    duals: list[list[float]] = field(default_factory=list)

    @property
    def scheme(self) -> Scheme:
        """The rules' scheme."""
        return next(iter(self.rules.values())).scheme

    def verify(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        """Look at the draft, and draw the next token from the target's row."""
        if len(self.kept.get(next(iter(self.rules)), ())) < self.positions:
            self.look(draft, target_probs)
        nothing, first = Draft.nothing(draft.tree.tokens[:, 0]), noise.again()
        return TopDown(NaiveMatch(self.scheme)).verify(nothing, target_probs[:, :1], first)

    def look(self, draft: Draft, target_probs: Tensor) -> None:
        """Note what the rules keep of a tree, how long their laws take, and the values of the bound."""
        kept = widened(self.shape)[1]
        whole, rows = within(draft, self.shape, kept), target_probs[:, kept]
        tree = without_rows_at_leaves(whole)
        for name, rule in self.rules.items():
            began = thread_time()
            law = rule.path_law(tree, rows)
            self.ms.setdefault(name, []).append(1e3 * (thread_time() - began))
            self.kept.setdefault(name, []).append(float(law.accepted(tree.tree).sum()))
        if UNIVER not in self.rules:  # prices where the top token is certain are far from tight
            self.duals.append([float(dual_values(whole, rows, self.scheme, one).sum()) for one in PRICES])


@dataclass(frozen=True)
class Subject:
    """Who writes, who drafts, and what is continued."""

    pair: Pair
    drafter: Drafter
    prompts: list[tuple[Tensor, int]]

    @classmethod
    def named(cls, name: str, texts: int) -> "Subject":
        """Load one with so many texts."""
        target = "smollm2" if name == "smollm2-head" else None
        pair = polydraft.load(target) if target else polydraft.load_pair()
        if name == "pair":
            drafter: Any = ModelDrafter(pair.draft)
        else:
            drafter = head_for(shipped_head(target) or embedded_head(), pair.target)
        chosen = in_turn(read_prompts("spec-bench-mini" if target else "python"))[:texts]
        prompts = [(encode(pair, one, 64), seed_of(one, 0)) for one in chosen]
        return cls(pair, replace(drafter, shortlist_size=LISTED), prompts)

    @torch.inference_mode()
    def line(self, temperature: float, drawn: str, word: str, trees: int) -> Line:
        """Measure all trees of one shape that are drawn in one way."""
        shape, looks = shape_of(word), list[Looking]()
        for prompt, seed in self.prompts:
            looks.append(Looking(RULES[drawn], shape, trees // len(self.prompts)))
            polydraft.stream(
                self.pair.target,
                prompt,
                drafter=self.drafter,
                verifier=looks[-1],
                policy=Fixed(widened(shape)[0]),
                temperature=temperature,
                top_k=0,
                seed=seed,
                eos_token_id=None,
                max_new_tokens=looks[-1].positions + 1,
            ).exhaust()
        kept = {name: torch.tensor([x for one in looks for x in one.kept[name]]) for name in RULES[drawn]}
        best = kept[OURS if OURS in kept else BLOCK]
        found: Line = {
            "shape": word,
            "drawn": drawn,
            "temperature": temperature,
            "texts": len(looks),
            "trees": len(best),
        }
        found["kept"] = {name: round(float(one.mean()), 4) for name, one in kept.items()}
        found["error"] = {name: error((best - one) if one is not best else one) for name, one in kept.items()}
        found["ms"] = {name: round(median(x for one in looks for x in one.ms[name]), 3) for name in kept}
        if looks[0].duals:
            bound = cross_fitted(torch.tensor([x for one in looks for x in one.duals]).T)
            found |= {"bound": round(float(bound.mean()), 4), "bound error": error(bound)}
        return found


def error(values: Tensor) -> float:
    """Return the standard error of a mean."""
    return round(float(values.std()) / len(values) ** 0.5, 4)


def record() -> list[Line]:
    """Return what was measured."""
    return [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


def measure(
    subject: str, ways: Sequence[str], shapes: Sequence[str], temperatures: Sequence[float], texts: int, trees: int
) -> None:
    """Append what the record does not have, line by line."""
    drafts = {shape_of(word).size for word in shapes}
    chains = [word for word in CHAINS if shape_of(word).size in drafts]
    tasks = [(subject, T, "chain", word) for T in temperatures for word in chains]
    tasks += [(subject, T, drawn, word) for T in temperatures for drawn in ways for word in shapes]
    loaded = None if done().issuperset(tasks) else Subject.named(subject, texts)
    for number, task in enumerate(tasks, 1):
        if loaded is None or task in done():  # by another run, too
            continue
        line = {"drafts": subject, **loaded.line(*task[1:], trees)}
        line |= {"machine": machine(loaded.pair.target.device)["processor"], "torch": versions()["torch"]}
        with RECORD.open("a") as file:
            file.write(json.dumps(line) + "\n")
        sys.stderr.write(f"{number} of {len(tasks)}: {task}\n")


def done() -> set[tuple[str, float, str, str]]:
    """Return what the record has."""
    return {(one["drafts"], one["temperature"], one["drawn"], one["shape"]) for one in record()}


def line_of(lines: Sequence[Line], drawn: str, word: str) -> Line | None:
    """Return the line of a shape that was drawn in one way, if there is one."""
    return next((one for one in lines if (one["drawn"], one["shape"]) == (drawn, word)), None)


def ahead(line: Line | None) -> str:
    """Say in per cent by how much `Valued` keeps more than the best published rule."""
    if line is None:
        return ""
    kept = line["kept"]
    best = max((name for name in PUBLISHED if name in kept), key=lambda name: kept[name])
    gain, off = (100 * part / kept[best] for part in (kept[OURS] - kept[best], line["error"][best]))
    return f"{gain:+.1f} ± {off:.1f}"


def share(line: Line | None, rule: str) -> str:
    """Return a rule's share of the bound on any exact rule."""
    return "" if line is None else f"{100 * line['kept'][rule] / line['bound']:.0f} %"


def cells(line: Line | None, part: str, *rules: str, digits: int = 2) -> list[str]:
    """Return one number for each rule."""
    return [f"{line[part][rule]:.{digits}f}" if line else "" for rule in rules]


def rows_of(lines: Sequence[Line]) -> list[list[str]]:
    """Return the cells of a table, a row for each shape."""
    rows = list[list[str]]()
    for word in SHAPES:
        drafts = shape_of(word).size - 1
        of = {drawn: line_of(lines, drawn, word) for drawn in RULES} | {
            "chain": line_of(lines, "chain", ";".join("1" * drafts))
        }
        if not any(of[drawn] for drawn in ("without", "independent", "top")):
            continue
        rows.append(
            [word.replace(";", "; "), str(drafts), *cells(of["chain"], "kept", BLOCK), share(of["chain"], BLOCK)]
        )
        for drawn, rules in (("without", (RECURSIVE, DOWN, UP, TRAVERSAL, OURS)), ("independent", (TRAVERSAL, OURS))):
            rows[-1] += [*cells(of[drawn], "kept", *rules), ahead(of[drawn]), share(of[drawn], OURS)]
        rows[-1] += [*cells(of["top"], "kept", UNIVER, OURS), ahead(of["top"])]
        rows[-1] += cells(of["without"], "ms", TRAVERSAL, OURS, digits=1)
    return rows


HEAD = [
    *("shape", "drafts", "chain", "of the bound"),
    *("without replacement: recursive", DOWN, UP, TRAVERSAL, "`Valued`", "ahead, %", "of the bound"),
    *("independent: traversal", "`Valued`", "ahead, %", "of the bound"),
    *("UniVer", "`Valued` on its drafts", "ahead, %", "traversal, ms", "`Valued`, ms"),
]


def tables() -> str:
    """Return a table for all trees of one drafter at one temperature; columns without a number are left out."""
    lines, made = record(), list[str]()
    for drafts, title in SUBJECTS.items():
        mine = [one for one in lines if one["drafts"] == drafts]
        for temperature in sorted({one["temperature"] for one in mine}, reverse=True):
            some = [one for one in mine if one["temperature"] == temperature]
            rows = rows_of(some)
            if not rows:
                continue
            there = [place for place in range(len(HEAD)) if any(row[place] for row in rows)]
            counts = " or ".join(sorted({f"{one['trees']} trees of {one['texts']} texts" for one in some}))
            made.append(f"\n**{title}, T = {temperature:g}**, {counts}.\n\n")
            for row in (HEAD, ["---"] * len(HEAD), *rows):
                made.append(f"| {' | '.join(row[place] for place in there)} |\n")
    processors = ", ".join(sorted({one["machine"] for one in lines}))
    made.append(f"\n{processors}, one thread, torch {', '.join(sorted({one['torch'] for one in lines}))}.\n")
    return "".join(made)


def with_tables(page: str) -> str:
    """Return the page with the tables of the record."""
    head, rest = page.split(MARKS[0])
    return head + MARKS[0] + tables() + MARKS[1] + rest.split(MARKS[1])[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", choices=SUBJECTS)
    parser.add_argument(
        "--drawn", nargs="+", choices=[one for one in RULES if one != "chain"], default=["without", "top"]
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 0.7])
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--trees", type=int, default=256, help="of a line, from all texts")
    options = parser.parse_args()
    if options.drafts:
        torch.set_num_threads(1)
        measure(options.drafts, options.drawn, options.shapes, options.temperatures, options.texts, options.trees)
    if PAGE.exists():
        PAGE.write_text(with_tables(PAGE.read_text()))

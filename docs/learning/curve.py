"""Show a draft texts of one kind, then of another, then of the first again, and write the table of docs/learning.md.

    python docs/learning/curve.py --run                      # about an hour on one core
    python docs/learning/curve.py --run --target smollm2     # likewise
    python docs/learning/curve.py                            # the tables and figures alone

The embedded target writes behind beginnings of Python code and of English at temperature 1. All drafts begin with one
start: the shipped draft's shapes, trained from nothing on other texts of code. They hear the same texts in the same
order: *frozen* is the start; *learning* takes the steps and looks of `serve --learn`, so many steps a text, and each
text counts under the version in use when it comes; *offline* took as many steps beforehand, on other texts of both
kinds, and is frozen then. What a text is worth is counted and not decoded: its tokens over the target calls that are
expected of chains of five. Nothing here is timed. SmolLM2 writes 300 texts of each phase, and begins with the head that
ships for it.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import polydraft
from polydraft.bench import read_prompt_sets
from polydraft.bench.prompts.prompt import encode
from polydraft.bench.style import COLOURS, panels, save
from polydraft.drafters import ModelDrafter
from polydraft.drafters.learnt import states_to_learn
from polydraft.engine import as_drafter
from polydraft.models import HuggingFaceModel, Layer, Pair, load_pair
from polydraft.models.checkpoints.weight_versions import VersionFolder, Weights, put_weights, weights_of
from polydraft.probs import Noise
from polydraft.training.corpus import standard_library
from polydraft.training.heads.shards import continued
from polydraft.training.online.lesson_buffer import TaughtText
from polydraft.training.online.online_learning import ROLLED_BACK, SWAPPED, LearningPlan, OnlineLearner, calls_of
from polydraft.training.online.taught_drafts import taught

DOCS = Path(__file__).parents[1]
PAGE = DOCS / "learning.md"
PHASES = "code", "English", "code"
GIVEN, LENGTH, EVERY, STEPS = 32, 144, 4, 1000
"""Tokens of a beginning and of a whole text; texts that come for each step; steps of the start."""
ENGLISH = "gsm8k", "spec-bench-mini"
FROZEN, LEARNING, OFFLINE, START = "frozen", "learning", "offline", "start"
Line = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What is measured with one target.

    Args:
        target: its name.
        words: what it is called in the table.
        texts: of each phase.
        together: texts that are written at once.
        plan: how the draft learns.
        mark: of its record, table and picture.
        width: batches of texts of a point of the curve.
    """

    target: str
    words: str
    texts: int
    together: int
    plan: LearningPlan
    mark: str
    width: int

    @property
    def record(self) -> Path:
        """Where its lines are."""
        return DOCS / "learning" / f"{self.mark}.jsonl"

    @property
    def lines(self) -> list[Line]:
        """The lines of its record."""
        return [json.loads(line) for line in self.record.read_text().splitlines()] if self.record.exists() else []


FEW = LearningPlan(together=2, steps=25, held_texts=24, held_tokens=2_000)
SETTINGS = {
    "pair": Setting("pair", "Embedded pair", 2048, 64, LearningPlan(), "curve", 4),
    "smollm2": Setting("smollm2", "SmolLM2-135M with its head", 300, 30, FEW, "curve-smollm2", 2),
}
PICTURES = {"curve": "learning", "curve-smollm2": "learning-smollm2"}


def pieces(texts: Sequence[Tensor], count: int, seed: int) -> list[Tensor]:
    """Return so many beginnings, drawn from all places of some texts."""
    (random,) = Noise.from_seed(seed, 1).generators
    whole = [one for one in texts if len(one) > GIVEN]
    sizes = torch.tensor([len(one) - GIVEN for one in whole])
    chosen = torch.multinomial(sizes.double(), count, replacement=True, generator=random).tolist()
    starts = [int(torch.randint(int(sizes[place]), (1,), generator=random)) for place in chosen]
    return [whole[place][first : first + GIVEN] for place, first in zip(chosen, starts, strict=True)]


def beginnings(pair: Pair, kind: str) -> list[Tensor]:
    """Return texts of a kind, as tokens."""
    if kind == "English":
        return [encode(pair, one, 512)[0] for one in read_prompt_sets(ENGLISH, None, chat_template=False)]
    return [
        pair.tokenizer(one.text[:3000], return_tensors="pt", verbose=False)["input_ids"][0]
        for one in standard_library()
    ]


def written(
    target: HuggingFaceModel, given: Sequence[Tensor], seed: int, together: int, reads: tuple[Layer, ...]
) -> Iterator[TaughtText]:
    """Let the target write on; yield texts with its states."""
    (random,) = Noise.from_seed(seed, 1).generators
    for first in range(0, len(given), together):
        some = given[first : first + together]
        found = continued(target, some, torch.ones(len(some)), LENGTH, reads, random)
        for row, (ids, final) in enumerate(zip(found["ids"].tolist(), found["final"], strict=True)):
            features = found["features"][row].bfloat16() if reads else None
            yield TaughtText(tuple(ids), GIVEN, 1.0, final.bfloat16(), features=features)


class Curve:
    """The three drafts.

    Args:
        setting: the target, the texts and how the draft learns.
        folder: where versions are kept.
    """

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting, self.texts = setting, setting.texts
        self.pair = load_pair() if setting.target == "pair" else polydraft.load(setting.target)
        self.target = HuggingFaceModel(self.pair.target)
        self.sources = {kind: beginnings(self.pair, kind) for kind in dict.fromkeys(PHASES)}
        self.folder = folder
        self.head = None if setting.target == "pair" else as_drafter(self.pair.draft)
        self.reads = () if self.head is None else states_to_learn(self.head)
        self.first = self.start() if self.head is None else None

    def learner(self, name: str, rate: float = LearningPlan.rate) -> OnlineLearner:
        """Return a draft of the shipped one's shapes with the start's weights if there are any, or the shipped head."""
        folder, drafter = self.folder / name, self.head
        folder.mkdir()
        if drafter is None:
            drafter = ModelDrafter(HuggingFaceModel(self._new(name)))
        made = taught(drafter, self.pair.target)
        return OnlineLearner(*made, VersionFolder(folder), replace(self.setting.plan, rate=rate))

    def _new(self, name: str) -> Any:
        draft: Any = self.pair.draft
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            network = type(draft)(draft.config).float()
        if name != START:
            assert self.first is not None
            put_weights(network, self.first)
        return network

    def start(self) -> Weights:
        """Train a draft from nothing on code, and return its weights."""
        made = self.learner(START, 2e-3)
        for lesson in self.of(PHASES[0], 4, self.texts // 2):
            made.hear(lesson)
        for _ in range(STEPS):
            made.step()
        return weights_of(made.network)

    def of(self, kind: str, seed: int, count: int) -> Iterator[TaughtText]:
        """Yield texts of a kind."""
        given = pieces(self.sources[kind], count, 100 + seed)
        return written(self.target, given, 200 + seed, self.setting.together, self.reads)

    def offline(self) -> OnlineLearner:
        """Return a draft that learnt both kinds beforehand, with as many steps."""
        made = self.learner(OFFLINE)
        for seed, kind in ((5, PHASES[0]), (6, PHASES[1])):
            for lesson in self.of(kind, seed, self.texts // 2):
                made.hear(lesson)
        for _ in range(len(PHASES) * self.texts // EVERY):
            made.step()
        return made

    def lines(self) -> Iterator[Line]:
        """Yield what the texts that were written at once come to."""
        drafts = {FROZEN: self.learner(FROZEN), OFFLINE: self.offline(), LEARNING: self.learner(LEARNING)}
        learning, used = drafts[LEARNING], self.learner("in-use")
        for place, kind in enumerate(PHASES):
            every = list(self.of(kind, place, self.texts))
            for first in range(0, self.texts, self.setting.together):
                some = every[first : first + self.setting.together]
                told: Line = {"phase": place, "kind": kind, "texts": len(some), "tokens": len(some) * (LENGTH - GIVEN)}
                for name in (FROZEN, OFFLINE):
                    told[name] = round(float(calls_of(drafts[name].training, some).sum()), 2)
                put_weights(used.network, in_use(learning))
                told[LEARNING] = round(float(calls_of(used.training, some).sum()), 2)
                told["looks"] = [*learnt(learning, some)]
                yield told


def in_use(learning: OnlineLearner) -> Weights:
    """Return the weights of the version in use."""
    return learning.folder.read(learning.used) if learning.used.number else learning.base


def learnt(learning: OnlineLearner, lessons: Sequence[TaughtText]) -> Iterator[Line]:
    """Hear texts, take the steps and looks that are due; yield what came of looks."""
    for number, lesson in enumerate(lessons):
        learning.hear(lesson)
        if number % EVERY == 0 and learning.learns:
            learning.step()
        if learning.looks:
            found = learning.look()
            share = None if found.saving is None else round(found.saving.share, 4)
            yield {"outcome": found.outcome, "share": share, "reason": found.reason}


def per_call(lines: Sequence[Line], arm: str) -> float:
    """Return an arm's tokens per target call."""
    return sum(one["tokens"] for one in lines) / sum(one[arm] for one in lines)


def table(setting: Setting) -> str:
    """Return tokens per call by phase, its first and its last quarter, and what came of looks."""
    lines = setting.lines
    if not lines:
        return ""
    made = ["| phase, texts | part | frozen | learning | offline | swaps, looks |\n|---|---|---|---|---|---|\n"]
    for place, kind in enumerate(PHASES):
        own = [one for one in lines if one["phase"] == place]
        quarter = max(1, len(own) // 4)
        for part, some in (("first quarter", own[:quarter]), ("all", own), ("last quarter", own[-quarter:])):
            looks = [look["outcome"] for one in some for look in one["looks"]]
            told = f"{looks.count(SWAPPED)}, {len(looks)}"
            cells = [f"{per_call(some, arm):.3f}" for arm in (FROZEN, LEARNING, OFFLINE)]
            name = f"{place + 1}: {sum(one['texts'] for one in own):,} of {kind}"
            made += [f"| {' | '.join([name, part, *cells, told])} |\n"]
    backs = sum(look["outcome"] == ROLLED_BACK for one in lines for look in one["looks"])
    made += [
        f"\n{setting.words}, temperature 1, {LENGTH - GIVEN} tokens a text behind {GIVEN} of a beginning, a step of 8 "
        f"texts for every {EVERY} that came; tokens per expected call of chains of five. Roll-backs: {backs}.\n"
    ]
    return "".join(made)


def with_table(page: str, setting: Setting) -> str:
    """Return the page with the table of a record."""
    begins, ends = f"<!-- table: {setting.mark} -->\n", f"<!-- end of {setting.mark} -->"
    head, rest = page.split(begins)
    return head + begins + table(setting) + ends + rest.split(ends)[1]


def curves(setting: Setting) -> Any:
    """Draw tokens per call over the texts that came, each point the mean of some batches, and swaps."""
    lines, width = setting.lines, setting.width
    figure, (axis,) = panels(["A draft that learns, beside one that does not"], 3.2)
    figure.set_size_inches(6.8, 3.2)
    seen = [sum(one["texts"] for one in lines[: place + 1]) for place in range(len(lines))]
    for arm, colour in zip((FROZEN, LEARNING, OFFLINE), COLOURS, strict=False):
        some = range(width, len(lines) + 1, width)
        axis.plot(
            [seen[end - 1] for end in some],
            [per_call(lines[end - width : end], arm) for end in some],
            color=colour,
            linewidth=4.0 if arm == FROZEN else 1.5,  # seen where the others lie on it
            label=arm,
        )
    for at, one in zip(seen, lines, strict=True):
        if any(look["outcome"] == SWAPPED for look in one["looks"]):
            axis.axvline(at, color="grey", linewidth=0.6, linestyle=":")
    axis.set_xlabel("texts that came (code, English, code); dotted: swaps")
    axis.set_ylabel("tokens per expected call")
    axis.legend()
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--target", choices=[*SETTINGS], default="pair", help="of the run")
    parser.add_argument("--texts", type=int, help="of a phase; default: as many as the page tells")
    options = parser.parse_args()
    if options.run:
        chosen = SETTINGS[options.target]
        chosen = replace(chosen, texts=options.texts or chosen.texts)
        with tempfile.TemporaryDirectory() as made, chosen.record.open("w") as file:
            for found in Curve(chosen, Path(made)).lines():
                file.write(json.dumps(found) + "\n")
                file.flush()
    for one in SETTINGS.values():
        if one.lines:
            PAGE.write_text(with_table(PAGE.read_text(), one))
            save(partial(curves, one), DOCS / "pictures" / f"{PICTURES[one.mark]}.svg")

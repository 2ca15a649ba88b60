"""Measure how far views of a target agree with it, without a clock, and write the tables of docs/itself.md.

    python docs/itself/overlap.py --target pair --prompts code.py other.py
    python docs/itself/overlap.py --target smollm2 --prompts book.txt other.txt
    python docs/itself/overlap.py                                                 # the tables alone

At a place of a text the overlap of the target's law p with a view's q is sum_x min(p(x), q(x)) at temperature 1: the
chance that a lone draft is accepted there. A view's row is that of a first draft: its own keys of the token at the
place, the target's of all before, or copies of some. Of views over few keys the copies are chosen behind so many
tokens (`KNOWN`), all later ones are kept, and places stand at several distances from the choice. A view is a line of
docs/itself/overlap.jsonl; what is there is not measured again.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import polydraft
from polydraft import Chunks, Mass, Recent, Snap, View
from polydraft.drafters import Keys
from polydraft.drafters.itself.few_keys import UNCHOSEN, FewKeys, NewestQueries, with_newest
from polydraft.models import Cache, HuggingFaceModel, LanguageModel, LayerSet
from polydraft.probs import SamplingParams, to_probs
from polydraft.reading import Reader, Text

DOCS = Path(__file__).parents[1]
RECORD, PAGE = DOCS / "itself" / "overlap.jsonl", DOCS / "itself.md"
MARKS = "<!-- table: overlap -->\n", "<!-- end of overlap -->"
KNOWN = {"pair": 704, "smollm2": 2048}
"""Known tokens behind which keys are chosen, by target; 256 follow."""
DISTANCES, RUN, TAIL, SEED = (0, 48, 112, 240), 16, 256, 1
PIECES = 6
BUDGETS = (64, 128, 256, 512, 1024)
KINDS = ("recent", "snap", "chunks", "mass")
NAMES = {"pair": "embedded pair", "smollm2": "SmolLM2-135M"}
Line = dict[str, Any]


def keys_named(kind: str, budget: int) -> Keys:
    """Return a choice of so many keys, which is kept for all places that are looked at."""
    made: dict[str, Keys] = {
        "recent": Recent(16, budget - 16, room=TAIL),
        "snap": Snap(budget, room=TAIL),
        "chunks": Chunks(budget, room=TAIL),
        "mass": Mass(budget, room=TAIL),
    }
    return made[kind]


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece of a text that the target has read, and its laws behind some places.

    Args:
        tokens: the piece.
        known: how many of them were known when keys were chosen.
        reader: the target's reader of all.
        queries: those of the newest of the known tokens.
        laws: of the target, behind the places.
    """

    tokens: Tensor
    known: int
    reader: Reader
    queries: NewestQueries
    laws: Tensor

    @classmethod
    def of(cls, target: HuggingFaceModel, tokens: Tensor, known: int) -> "Piece":
        """Read a piece."""
        reader = Reader.new(target, 1, len(tokens) + len(places(known)), queries=32)
        reader, features = reader.catch_up(text_of(tokens[: known + 1]))
        assert features is not None
        (queries,) = with_newest((NewestQueries(),), features, 32)
        reader, _ = reader.catch_up(text_of(tokens))
        laws = law(target, reader.cache, tokens, places(known), known, known)
        return cls(tokens, known, reader, queries, laws)

    def overlaps(self, model: LanguageModel, keys: Keys | None) -> Tensor:
        """Return a view's overlap at every place."""
        at, cache, copies = places(self.known), self.reader.cache, self.known
        if keys is not None:
            before = self.reader.at(text_of(self.tokens[: self.known + 1]))
            few = FewKeys((UNCHOSEN,))
            own, view = few.following(keys, before, (self.queries,), TAIL + len(at), 2**20, model)
            copies = view.filled[0]
            _, view = own.following(keys, self.reader, (self.queries,), len(at), 2**20, model)
            cache = view.cache
        return law(model, cache, self.tokens, at, copies, self.known).minimum(self.laws).sum(-1)


def text_of(tokens: Tensor) -> Text:
    """Return tokens as a text of one row."""
    return Text(tokens.unsqueeze(0), torch.tensor([len(tokens)]))


def places(known: int) -> list[int]:
    """Return the places that are looked at: runs at some distances from the choice of keys."""
    return [known + distance + step for distance in DISTANCES for step in range(RUN)]


def law(model: LanguageModel, cache: Cache, tokens: Tensor, at: Sequence[int], copies: int, known: int) -> Tensor:
    """Return a model's laws behind places, each with the keys of tokens before it, and its own in a free slot.

    Args:
        model: the model.
        cache: copies of keys of the known tokens, and behind them those of all tokens since but the last.
        tokens: the piece.
        at: the places.
        copies: how many copies there are.
        known: of how many tokens.
    """
    numbers, free = torch.tensor(at), copies + len(tokens) - 1 - known
    before = torch.arange(free) - copies + known < numbers.unsqueeze(-1)
    mask = torch.cat([before, torch.eye(len(at), dtype=torch.bool)], 1).unsqueeze(0)
    passed = model.forward(tokens[numbers].unsqueeze(0), numbers.unsqueeze(0), mask, cache, torch.tensor([free]))
    return to_probs(passed.logits[0], SamplingParams(temperature=1.0))


def views(target: HuggingFaceModel, known: int) -> Iterator[tuple[str, View, Keys | None]]:
    """Yield what is measured: its word, the view of all keys, and which keys are kept of it."""
    for word in ("self:int8", "self:int4"):
        yield word, View(word.removeprefix("self:")), None
    for layer in range(target.layers):
        one, none = frozenset({layer}), frozenset[int]()
        yield f"self:skip-attention={layer}", View(layers=LayerSet(one, none)), None
        yield f"self:skip-mlp={layer}", View(layers=LayerSet(none, one)), None
        if layer < target.layers - 1:
            yield f"self:exit={layer + 1}", View(layers=LayerSet(exit=layer + 1)), None
    for kind in KINDS:
        for budget in BUDGETS:
            if budget < known:
                yield f"keys={kind}:{budget}", View(), keys_named(kind, budget)


def pieces_of(pair: Any, texts: Sequence[str], known: int) -> Iterator[Tensor]:
    """Yield pieces of the texts in turn, each from a place of its own."""
    chosen, length = random.Random(SEED), known + TAIL + 1
    encoded = [pair.tokenizer(one, return_tensors="pt")["input_ids"][0] for one in texts]
    for number in range(PIECES):
        tokens = encoded[number % len(encoded)]
        first = chosen.randrange(len(tokens) - length + 1)
        yield tokens[first : first + length]


@torch.inference_mode()
def measure(name: str, pair: Any, prompts: Sequence[Path]) -> None:
    """Append what is not yet in the record, view by view."""
    known = KNOWN[name]
    target = HuggingFaceModel(pair.target)
    texts = [one.read_text(encoding="utf-8") for one in prompts]
    there = {one["view"] for one in record() if one["target"] == name}
    pieces = [Piece.of(target, tokens, known) for tokens in pieces_of(pair, texts, known)]
    for word, view, keys in views(target, known):
        if word in there:
            continue
        model = view.model(target)
        found = torch.stack([one.overlaps(model, keys) for one in pieces]).unflatten(-1, (len(DISTANCES), RUN))
        line = {
            "target": name,
            "view": word,
            "overlap": [round(float(one), 4) for one in found.mean(-1).mean(0)],
            "known": known,
            "places": found.numel(),
            "texts": [one.name for one in prompts],
        }
        with RECORD.open("a") as file:
            file.write(json.dumps(line) + "\n")


def record() -> list[Line]:
    """Return the lines of the record."""
    return [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


def tables() -> str:
    """Return a table of layers and one of keys, with the conditions."""
    lines = record()
    targets = [name for name in NAMES if any(one["target"] == name for one in lines)]
    known = {(one["target"], one["view"]): one["overlap"] for one in lines}
    made = list[str]()
    for name in targets:
        mine = [one for one in lines if one["target"] == name]
        texts = ", ".join(mine[0]["texts"])
        rounded = ", ".join(f"`self:{bits}` {mean(known[name, f'self:{bits}'])}" for bits in ("int8", "int4"))
        made.append(
            f"\n* {NAMES[name]}: {rounded}; {mine[0]['places']:,} places of {PIECES} pieces of {texts}, behind "
            f"{mine[0]['known']:,} tokens and up to {TAIL} more."
        )
    made.append(
        "\n\n"
        + _head("layer", [f"{NAMES[name]}: without its attention | its MLP | exit behind it" for name in targets])
    )
    layers = {name: sum(1 for own, view in known if own == name and "skip-mlp" in view) for name in targets}
    for layer in range(max(layers.values(), default=0)):
        row = [f"{layer}"]
        for name in targets:
            for word in (f"self:skip-attention={layer}", f"self:skip-mlp={layer}", f"self:exit={layer + 1}"):
                row.append(mean(known[name, word]) if (name, word) in known else "")
        made.append(f"| {' | '.join(row)} |\n")
    made.append("\n" + _head("keys", [f"{NAMES[n]}: {' | '.join(f'{one}' for one in DISTANCES)}" for n in targets]))
    for kind in KINDS:
        for budget in BUDGETS:
            row = [f"`{kind}`, {budget}"]
            for name in targets:
                found = known.get((name, f"keys={kind}:{budget}"))
                row += [""] * len(DISTANCES) if found is None else [f"{one:.2f}" for one in found]
            made.append(f"| {' | '.join(row)} |\n")
    return "".join(made)


def mean(values: Sequence[float]) -> str:
    """Return the mean over all distances, for a cell."""
    return f"{sum(values) / len(values):.2f}"


def _head(first: str, rest: Sequence[str]) -> str:
    columns = " | ".join([first, *rest])
    return f"| {columns} |\n|" + "---|" * (columns.count("|") + 1) + "\n"


def with_tables(page: str) -> str:
    """Return the page with the tables of the record."""
    head, rest = page.split(MARKS[0])
    return head + MARKS[0] + tables() + MARKS[1] + rest.split(MARKS[1])[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=[*KNOWN])
    parser.add_argument("--prompts", nargs="*", type=Path, default=[])
    options = parser.parse_args()
    if options.target:
        measure(options.target, polydraft.load(options.target), options.prompts)
    if MARKS[0] in PAGE.read_text():
        PAGE.write_text(with_tables(PAGE.read_text()))

"""Views for tests: keys chosen at random, chains grown by hand, and a model's own rows under a mask for every head."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from polydraft.drafters import Chunks, Keys, Mass, Recent, SelfDrafter, Snap, View
from polydraft.drafters.itself.few_keys import NewestQueries, with_newest
from polydraft.models import HuggingFaceModel
from polydraft.models.checks.layout import windowed_layers
from polydraft.reading import Features, Reader, Text
from polydraft.trees import Frontier

EVERY: list[Keys] = [Snap(10, 6), Recent(2, 8, room=6), Mass(10, 6), Chunks(10, 3, 6)]
FIRST = [EVERY[0], *(pytest.param(one, marks=pytest.mark.slow) for one in EVERY[1:])]
"""The same, of which only one is quick."""


@dataclass(eq=False)
class AnyKeys:
    """Any slots of each head, noted in the order in which layers were asked."""

    budget: int
    room: int = 6
    queries: int = 1
    stream: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(5))
    told: list[Tensor] = field(default_factory=list)

    def slots(self, known: int, keys: Tensor, queries: Tensor) -> Tensor:
        order = torch.rand(len(keys), known, generator=self.stream).argsort(-1)
        self.told.append(order[:, : self.budget].sort(-1).values)
        return self.told[-1]

    def taken(self, layers: int) -> list[list[Tensor]]:
        """Return what was chosen since, by rows, and forget it."""
        told, self.told = self.told, []
        return [told[first : first + layers] for first in range(0, len(told), layers)]


def few(keys: Keys) -> SelfDrafter:
    """Return the target drafting for itself over few of its keys."""
    return SelfDrafter(View(keys=keys))


def text_of(rows: Sequence[Sequence[int]], room: int = 64) -> Text:
    tokens = torch.zeros(len(rows), room, dtype=torch.int64)
    for row, own in enumerate(rows):
        tokens[row, : len(own)] = torch.tensor(own)
    return Text(tokens, torch.tensor([len(own) for own in rows]))


def started(model: HuggingFaceModel, text: Text, most: int = 1) -> tuple[Reader, tuple[NewestQueries, ...]]:
    """Return a reader that has read all but the last tokens, and the newest queries."""
    reader, features = Reader.new(model, len(text.counts), 64, queries=most).catch_up(text)
    assert isinstance(features, Features)
    return reader, with_newest((NewestQueries(),) * len(text.counts), features, most)


def chain_of(view: Reader, text: Text, drafts: Tensor) -> Tensor:
    """Return the rows "b d V" at the root and at each node of a chain below it."""
    tokens, found = torch.cat([text.last().unsqueeze(-1), drafts], 1), list[Tensor]()
    for depth in range(tokens.shape[1]):
        seen = torch.ones(len(tokens), 1, depth + 1, dtype=torch.bool)
        frontier = Frontier(range(depth, depth + 1), tokens[:, depth : depth + 1], depth, seen)
        found.append(view.grow(text, frontier))
    return torch.cat(found, 1)


def own_rows(
    model: PreTrainedModel, tokens: Sequence[int], known: int, kept: Sequence[Tensor], shift: int = 0
) -> Tensor:
    """Return the rows of the tokens behind the known ones by the model's own eager attention.

    Known tokens see all before them. Those behind see the kept slots of their head, each other as in a chain, and in
    layers with windows what lies in these.

    Args:
        kept: by layer, the slots that each head of keys keeps.
        shift: by how much the places of the tokens behind are wrong.
    """
    count, hooks = len(tokens), list[Any]()
    places = torch.arange(count) + shift * (torch.arange(count) >= known)
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) or count
    windows = HuggingFaceModel(model, fused=False).windows
    short = windowed_layers(windows, config, len(kept))

    def masked(layer: int) -> Any:
        heads = kept[layer].shape[0]
        seen = torch.ones(heads, count, count, dtype=torch.bool).tril()
        seen[:, known:, :known] = torch.zeros(heads, known, dtype=torch.bool).scatter(1, kept[layer], True).unsqueeze(1)
        if layer in short:
            seen &= places.unsqueeze(-1) - places < window
        seen = seen.repeat_interleave(config.num_attention_heads // heads, 0)
        mask = torch.zeros(1, *seen.shape, dtype=model.dtype).masked_fill(~seen, torch.finfo(model.dtype).min)
        return lambda _module, given, named: (given, {**named, "attention_mask": mask})

    attentions = [
        one for name, one in model.named_modules() if name.split(".")[-1] in ("self_attn", "attn", "attention")
    ]
    assert len(attentions) == len(kept) and config._attn_implementation == "eager"
    try:
        hooks = [one.register_forward_pre_hook(masked(layer), with_kwargs=True) for layer, one in enumerate(attentions)]
        with torch.no_grad():
            return model(torch.tensor([tokens]), position_ids=places.unsqueeze(0)).logits[0, known:]
    finally:
        for hook in hooks:
            hook.remove()

"""A model that has read a text once and scores trees that hang at any place of it, all in one row of its cache."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.models import Cache, LanguageModel
from polydraft.trees import causal_mask


@dataclass(frozen=True, eq=False)
class Reading:
    """A text in a model's cache.

    Args:
        model: the model.
        cache: its keys and values of the whole text, with room for branches behind it.
        length: the tokens of the text.
        logits: the rows after the last `keep` tokens, in double precision.
    """

    model: LanguageModel
    cache: Cache
    length: int
    logits: Float[Tensor, "m V"]


def read(model: LanguageModel, tokens: Int[Tensor, " t"], keep: int, room: int) -> Reading:
    """Score a text in one pass.

    Args:
        model: the model; token ids beyond its vocabulary are read as its last one.
        tokens: the text.
        keep: how many of the last rows of logits to return.
        room: how many nodes of branches the cache has to hold beside the text.
    """
    length = len(tokens)
    cache = model.new_cache(1, length + room)
    lengths = torch.tensor([length], device=tokens.device)
    own = tokens.clamp_max(model.facts.vocab_size - 1).unsqueeze(0)
    positions = torch.arange(length, device=tokens.device).unsqueeze(0)
    mask = causal_mask(lengths, length)
    logits = model.forward(own, positions, mask, cache, torch.zeros_like(lengths), logits_to_keep=keep).logits
    return Reading(model, cache, length, logits[0, -keep:].double())


class TreesBelow:
    """Trees of one size below several tokens of a text; nodes are scored in any order that has parents first.

    Every tree sees the text up to and without its root, and its own nodes, of which node 0 is the root.

    Args:
        reading: the text.
        roots: the places in the text of the trees' roots.
        size: nodes per tree, the root included.
    """

    def __init__(self, reading: Reading, roots: Int[Tensor, "b"], size: int) -> None:
        self.reading = reading
        self.roots = roots
        self.slots = torch.full((len(roots), size), -1, device=roots.device)
        self.used = reading.length

    def score(
        self, nodes: range, tokens: Int[Tensor, "b f"], depth: Int[Tensor, "b f"], ancestors: Bool[Tensor, "b f n"]
    ) -> Float[Tensor, "b f V"]:
        """Return the logits after these nodes, in double precision.

        Args:
            nodes: the nodes' numbers, the same in every tree.
            tokens: their token ids.
            depth: their depths.
            ancestors: which of the tree's first n nodes each descends from, itself included.
        """
        model, count = self.reading.model, tokens.numel()
        fresh = torch.arange(self.used, self.used + count, device=tokens.device)
        self.slots[:, nodes.start : nodes.stop] = fresh.view(tokens.shape)
        start, self.used = self.used, self.used + count
        positions = (self.roots.unsqueeze(-1) + depth).clamp_max(model.facts.context - 1)
        logits = model.forward(
            tokens.clamp(0, model.facts.vocab_size - 1).view(1, count),
            positions.view(1, count),
            self._mask(ancestors).view(1, count, self.used),
            self.reading.cache,
            torch.tensor([start], device=tokens.device),
        ).logits
        return logits.view(*tokens.shape, -1).double()

    def _mask(self, ancestors: Bool[Tensor, "b f n"]) -> Bool[Tensor, "b f m"]:
        batch, frontier, size = ancestors.shape
        slots = torch.arange(self.used, device=ancestors.device)
        text = (slots < self.roots.unsqueeze(-1)).unsqueeze(1).expand(batch, frontier, self.used)
        own = self.slots[:, None, :size].expand(batch, frontier, size)
        seen = torch.cat([text, text.new_zeros(batch, frontier, 1)], dim=-1)  # a spare place for unseen nodes
        return seen.scatter(-1, own.where(ancestors, self.used), True)[..., :-1]

"""Scoring a growing token tree with a causal language model, one forward pass per depth."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters.protocol import Session, Text
from polydraft.models import Cache, LanguageModel, check_same_size
from polydraft.trees import Frontier, Verdict, causal_mask, tree_mask


@dataclass(frozen=True, eq=False)
class TreeScorer:
    """A draft model's rows at the nodes of a growing tree, over a cache that keeps in step with the committed text.

    Between drafts the cache holds every committed token but the last two. Each draft begins by scoring these two, so
    that rows that accepted different numbers of drafts need no special case.

    Args:
        model: the model. Its vocabulary may be padded to another size than the target's.
    """

    model: LanguageModel

    def start(self, text: Text, session: Session) -> Cache:
        """Score the prompts but for their last two tokens; return the cache.

        Raises:
            VocabularyMismatch: the vocabularies differ by more than padding.
        """
        check_same_size(session.vocab_size, self.model.vocab_size)
        batch = len(text.lengths)
        cache = self.model.new_cache(batch, session.capacity + 1)
        known = text.lengths - 2
        width = int(known.max())
        if width > 0:
            tokens = self._own(text.tokens[:, :width])
            positions = self._inside(torch.arange(width, device=tokens.device).expand(batch, width))
            starts = torch.zeros_like(text.lengths).to(tokens.device)
            mask = causal_mask(known.to(tokens.device), width)
            self.model.forward(tokens, positions, mask, cache, starts, logits_to_keep=1)
        return cache

    def score(self, cache: Cache, text: Text, frontier: Frontier) -> Float[Tensor, "b f V"]:
        """Return the logits at the nodes of one depth: the root's level first, then one deeper at each call."""
        base = text.lengths - 1
        if frontier.depth == 0:
            return self._score_root(cache, text, base)
        first, stop = frontier.nodes.start, frontier.nodes.stop
        mask = tree_mask(frontier.ancestors, base, int(base.max()) + stop)
        positions = self._inside((base + frontier.depth).unsqueeze(-1).expand(-1, stop - first))
        return self.model.forward(self._own(frontier.tokens), positions, mask, cache, base + first).logits

    def commit(self, cache: Cache, text: Text, verdict: Verdict) -> None:
        """Keep the accepted nodes' keys; the deepest level was never scored, but is scored again anyway."""
        cache.keep(text.lengths - 1, verdict.path)

    def _score_root(self, cache: Cache, text: Text, base: Int[Tensor, "b"]) -> Float[Tensor, "b 1 V"]:
        """Score the last two committed tokens; in a prompt of one token the second place is scratch."""
        before = (base - 1).clamp_min(0)
        places = torch.stack([before, before + 1], dim=-1)
        tokens = self._own(text.tokens.gather(-1, places.clamp_max(text.tokens.shape[-1] - 1)))
        causal = torch.tensor([[True, False], [True, True]], device=tokens.device).expand(len(base), 2, 2)
        shortest, longest = base.aminmax()
        mask = tree_mask(causal, before, max(int(longest), 1) + 1)
        keep = 1 if int(shortest) > 0 else 0
        logits = self.model.forward(tokens, self._inside(places), mask, cache, before, logits_to_keep=keep).logits
        if keep:
            return logits[:, -1:]
        root = (base > 0).long().view(-1, 1, 1).expand(-1, 1, logits.shape[-1])
        return logits.gather(1, root)

    def _own(self, tokens: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
        return tokens.clamp(0, self.model.vocab_size - 1)

    def _inside(self, positions: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
        return positions.clamp_max(self.model.context - 1)

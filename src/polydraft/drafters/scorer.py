"""Scoring a growing token tree with a causal language model, one forward pass per depth."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters.protocol import Session, Text
from polydraft.models import Cache, LanguageModel, check_same_size
from polydraft.trees import Draft, Frontier, Verdict, causal_mask, tree_mask


@dataclass(frozen=True, eq=False)
class TreeScorer:
    """A draft model's rows at the nodes of a growing tree, over a cache that keeps in step with the committed text.

    Between drafts the cache holds every committed token but the last two, and those that were committed since without a
    draft. Each draft begins by scoring these, so that rows that accepted different numbers of drafts need no special
    case, and nothing is spent on steps that do not draft.

    Args:
        model: the model. Its vocabulary may be padded to another size than the target's.
    """

    model: LanguageModel

    def start(self, text: Text, session: Session, past: Cache | None = None, known: int = 0) -> Cache:
        """Score the prompts but for their last two tokens, unless nothing is to be drafted yet; return the cache.

        Args:
            text: the prompts.
            session: the capacity that they need, and whether anything is to be drafted yet.
            past: another text's cache, if there is one row.
            known: how many of its first slots are taken over: those tokens are not scored again.

        Raises:
            VocabularyMismatch: the vocabularies differ by more than padding.
        """
        check_same_size(session.vocab_size, self.model.vocab_size)
        batch = len(text.lengths)
        cache = self.model.new_cache(batch, session.capacity + 1)
        if past is not None and known:
            cache.join(0, past, known)
        inside = text.lengths - 2
        width = int(inside.max())
        if width > known and not session.idle:
            tokens = self._own(text.tokens[:, known:width])
            positions = self._inside(torch.arange(known, width, device=tokens.device).expand(batch, width - known))
            starts = torch.full_like(text.lengths, known).to(tokens.device)
            mask = causal_mask(inside.to(tokens.device), width, known)
            self.model.forward(tokens, positions, mask, cache, starts, logits_to_keep=1)
        return cache

    @staticmethod
    def behind(text: Text, session: Session, known: int = 0) -> int:
        """Return how many tokens before the last two of the longest text are not scored at the start."""
        return max(0, int(text.lengths.max()) - 2 - known) if session.idle else 0

    @staticmethod
    def held(before: Text, behind: int, text: Text, known: int) -> int:
        """Return how many slots of an earlier text's cache a text can take over, given so many common tokens."""
        return max(0, min(known, int(before.lengths) - 2 - behind, int(text.lengths) - 2))

    def score(self, cache: Cache, text: Text, frontier: Frontier, behind: int = 0) -> Float[Tensor, "b f V"]:
        """Return the logits at the nodes of one depth: the root's level first, then one deeper at each call.

        Args:
            cache: the model's keys.
            text: the committed tokens.
            frontier: the nodes.
            behind: how many steps since the last draft committed a token without one.
        """
        base = text.lengths - 1
        if frontier.depth == 0:
            return self._score_root(cache, text, base, 2 + behind)
        first, stop = frontier.nodes.start, frontier.nodes.stop
        mask = tree_mask(frontier.ancestors, base, int(base.max()) + stop)
        positions = self._inside((base + frontier.depth).unsqueeze(-1).expand(-1, stop - first))
        return self.model.forward(self._own(frontier.tokens), positions, mask, cache, base + first).logits

    def settle(self, cache: Cache, text: Text, draft: Draft) -> None:
        """Put the keys of a grown tree's nodes in the tree's order, where that is not the order of scoring."""
        if draft.scored is not None:
            cache.keep(text.lengths - 1, draft.scored[:, 1:])

    def commit(self, cache: Cache, text: Text, verdict: Verdict) -> None:
        """Keep the accepted nodes' keys; the deepest level was never scored, but is scored again anyway."""
        cache.keep(text.lengths - 1, verdict.path)

    def _score_root(self, cache: Cache, text: Text, base: Int[Tensor, "b"], last: int) -> Float[Tensor, "b 1 V"]:
        """Score the last so many committed tokens; in a shorter text the places after them are scratch."""
        first = (base + 1 - last).clamp_min(0)
        order = torch.arange(last, device=base.device)
        places = first.unsqueeze(-1) + order
        tokens = self._own(text.tokens.gather(-1, places.clamp_max(text.tokens.shape[-1] - 1)))
        causal = (order <= order.unsqueeze(-1)).expand(len(base), last, last)
        shortest, longest = base.aminmax()
        mask = tree_mask(causal, first, max(int(longest), last - 1) + 1)
        keep = 1 if int(shortest) >= last - 1 else 0
        logits = self.model.forward(tokens, self._inside(places), mask, cache, first, logits_to_keep=keep).logits
        if keep:
            return logits[:, -1:]
        root = (base - first).view(-1, 1, 1).expand(-1, 1, logits.shape[-1])
        return logits.gather(1, root)

    def _own(self, tokens: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
        return tokens.clamp(0, self.model.vocab_size - 1)

    def _inside(self, positions: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
        return positions.clamp_max(self.model.context - 1)

"""A smaller language model with the same tokens, drafting a tree level by level."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters.protocol import Session, Text
from polydraft.models import Cache, LanguageModel, check_same_size
from polydraft.probs import Noise, SamplingParams, shortlist
from polydraft.schemes import IID, Scheme, TopK, TopThenSample, WithoutReplacement, require_scheme
from polydraft.trees import Draft, Frontier, TreePolicy, Verdict, causal_mask, grow, tree_mask


@dataclass(frozen=True, eq=False)
class ModelDraftState:
    """The draft model's cache and sampling settings.

    The cache holds every committed token but the last two. Each draft begins by scoring these two, so that rows
    that accepted different numbers of drafts need no special case.
    """

    cache: Cache
    params: SamplingParams
    vocab_size: int


@dataclass(frozen=True, eq=False)
class ModelDrafter:
    """Drafts with a causal language model that shares the target's tokens.

    Args:
        model: the draft model. Its vocabulary may be padded to another size than the target's.
        shortlist_size: draft rows are cut to this many likeliest tokens and renormalised; costs no exactness.
        params: the draft's own temperature and filters; None for the target's.

    Raises:
        VocabularyMismatch: at the start, if the vocabularies differ by more than padding.
    """

    model: LanguageModel
    shortlist_size: int = 64
    params: SamplingParams | None = None
    name = "model"
    reads_hidden: tuple[int, ...] = ()

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, (IID, WithoutReplacement, TopK, TopThenSample), "A draft model")

    def start(self, text: Text, session: Session) -> ModelDraftState:
        """Score the prompts but for their last two tokens."""
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
        return ModelDraftState(cache, self.params or session.params, session.vocab_size)

    def draft(self, state: ModelDraftState, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise) -> Draft:
        """Grow a tree: one forward pass per depth for all rows and nodes of that depth."""
        base = text.lengths - 1

        def propose(frontier: Frontier) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f K"]]:
            score = self._score_root if frontier.depth == 0 else self._score_level
            logits = score(state, text, base, frontier)[..., : state.vocab_size]
            return shortlist(logits, state.params, self.shortlist_size)

        return grow(text.last(), policy, scheme, propose, noise)

    def commit(self, state: ModelDraftState, text: Text, verdict: Verdict) -> ModelDraftState:
        """Keep the accepted nodes' keys; the deepest level was never scored, but is scored again anyway."""
        state.cache.keep(text.lengths - 1, verdict.path)
        return state

    def _score_root(
        self, state: ModelDraftState, text: Text, base: Int[Tensor, "b"], frontier: Frontier
    ) -> Float[Tensor, "b f V"]:
        """Score the last two committed tokens; in a prompt of one token the second place is scratch."""
        before = (base - 1).clamp_min(0)
        tokens = self._own(torch.stack([text.last(2), text.last()], dim=-1))
        positions = self._inside(torch.stack([before, before + 1], dim=-1))
        causal = torch.ones(2, 2, dtype=torch.bool, device=tokens.device).tril().repeat(len(base), 1, 1)
        mask = tree_mask(causal, before, int(before.max()) + 2)
        one_token = bool((base == 0).any())
        keep = 0 if one_token else 1
        logits = self.model.forward(tokens, positions, mask, state.cache, before, logits_to_keep=keep).logits
        if not one_token:
            return logits[:, -1:]
        root = torch.where(base > 0, 1, 0).view(-1, 1, 1).expand(-1, 1, logits.shape[-1])
        return logits.gather(1, root)

    def _score_level(
        self, state: ModelDraftState, text: Text, base: Int[Tensor, "b"], frontier: Frontier
    ) -> Float[Tensor, "b f V"]:
        first, stop = frontier.nodes.start, frontier.nodes.stop
        mask = tree_mask(frontier.ancestors, base, int(base.max()) + stop)
        positions = self._inside((base + frontier.depth).unsqueeze(-1).expand(-1, stop - first))
        return self.model.forward(self._own(frontier.tokens), positions, mask, state.cache, base + first).logits

    def _own(self, tokens: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
        return tokens.clamp(0, self.model.vocab_size - 1)

    def _inside(self, positions: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
        return positions.clamp_max(self.model.context - 1)

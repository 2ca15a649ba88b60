"""P-EAGLE: EAGLE-3's network, which fills a slot for each draft in one pass.

The pass reads the pairs that came since and, behind the last of them, K - 1 slots of a mask token beside a learnt
feature, at the positions that follow. The last pair gives the first draft's row, and slot d that of draft d + 1:

    pair i:  [e(token i+1); h_i],   h_i = fc [h_1; ...; h_k];      slot:  [e(mask); h],   h = fc mask_hidden

A slot sees the pairs of the text and the slots before it, so that its row is equal for all nodes of a depth. What it
leaves in the cache is never seen again: the next step's pairs take its place.

Sources: P-EAGLE (arXiv 2602.01469), vllm-project/speculators (`models/peagle`), vllm-project/vllm,
sgl-project/SpecForge.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polydraft.drafters.contract import Defaults
from polydraft.drafters.heads.drafter import BoundEnds, HeadEnds, TreePass
from polydraft.drafters.heads.eagle_head import CHAIN, Eagle3Head, Eagle3Norms, PairMemory, PairPass
from polydraft.drafters.heads.sublayers import Anatomy, HeadCache
from polydraft.errors import InvalidParameter, VocabularyMismatch
from polydraft.models import LanguageModel, Layer
from polydraft.probs import SamplingParams
from polydraft.reading import Text
from polydraft.schemes import IID, TopK
from polydraft.trees import BestFirst, Chain, Frontier

DRAFTS, MOST_DRAFTS = 8, 64
"""How many drafts the authors' heads learn, and the most of a head's folder."""


class ParallelEagle(Eagle3Head):
    """P-EAGLE's head.

    Args:
        anatomy: sizes of its layers.
        reads: which of the target's hidden states it reads, joined in this order.
        target_width: the width of these.
        norms: where norms are; a slot's feature passes those before `fc`, too.
        mask_id: the token whose embedding fills the slots.
        layers: how many.
        drafts: K; deeper nodes are drafted from the last slot again.

    Raises:
        InvalidParameter: no draft, or a mask below 0.
    """

    name = "p-eagle"
    title = "A P-EAGLE head"
    passes = 1

    def __init__(
        self,
        anatomy: Anatomy,
        reads: tuple[Layer, ...],
        target_width: int,
        norms: Eagle3Norms,
        mask_id: int,
        layers: int = 1,
        drafts: int = DRAFTS,
    ) -> None:
        super().__init__(anatomy, reads, target_width, norms, layers)
        if drafts < 1 or mask_id < 0:
            raise InvalidParameter(f"A P-EAGLE head drafts a token or more and has a mask, not {drafts} and {mask_id}.")
        self.mask_id, self.drafts, self.ahead = mask_id, drafts, drafts - 1
        self.mask_hidden = nn.Parameter(torch.randn(len(reads) * target_width))

    def masked(self, tokens, hidden, blank):
        """Return the mask and the learnt feature, as `fused` makes it, where slots are behind the root's."""
        feature = self.fused(self.mask_hidden.unsqueeze(0)).to(hidden)
        return tokens.where(~blank, self.mask_id), hidden.where(~blank.unsqueeze(-1), feature)

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft the likeliest paths at temperature 0, and a drawn chain above it, no deeper than there are slots."""
        if params.temperature:
            return Defaults(IID(), Chain(min(CHAIN.length, self.drafts)))
        return Defaults(TopK(), BestFirst(16, depth=self.drafts))

    def check(self, target: LanguageModel, ends: HeadEnds) -> None:
        """Check that there is an embedding of the mask."""
        own = ends.embed_tokens
        known = target.facts.vocab_size if own is None else own.num_embeddings
        if self.mask_id >= known:
            raise VocabularyMismatch(
                f"The head's mask is token {self.mask_id} and there are embeddings of {known} tokens: it was trained "
                "for another target."
            )

    def new_cache(self, rows: int, capacity: int, like: Tensor) -> HeadCache:
        """Return an empty cache with room for the slots."""
        return super().new_cache(rows, capacity + self.ahead, like)

    def root(self, memory: PairMemory, text: Text, ends: BoundEnds) -> tuple[TreePass, PairMemory]:
        """Read what came since, and fill the slots, in one pass."""
        made, after = self.first_pass(memory, text, ends)
        return SlotPass(self, after, text, ends, made), after


@dataclass(eq=False)
class SlotPass(PairPass):
    """What a head made of the root's pair and of the slots behind it: a state for each depth."""

    def logits(self, frontier: Frontier) -> Float[Tensor, "b 1 V"]:
        """Return the logits of one depth, which all of its nodes share."""
        slot = min(frontier.depth, self.made.shape[1] - 1)
        return self.ends.output(self.head.before_output(self.made[:, slot : slot + 1]))

"""Rollback: greedy text in which drafts stay unless the target finds them very unlikely. Lossy."""

from dataclasses import dataclass
from math import inf

from jaxtyping import Float
from torch import Tensor

from polydraft.errors import require_number
from polydraft.probs import Noise
from polydraft.schemes import Given, Scheme, TopK, require_scheme
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.outcome_law import require_few
from polydraft.verifiers.trees.lifts import walk


@dataclass(frozen=True)
class Rollback:
    """Keep a drafted token unless its negative log-probability under the target is above a threshold.

    Problem: write nearly greedy text with fewer passes of the target; its greedy text is given up.
    Rule: p is the softmax of the target's scores at a node, x* its likeliest token. The draft x is kept if x = x* or
    -log p(x) <= threshold; at the first draft that is not kept, and behind the last one, x* is emitted.
    Law: of drafts with the law q a node emits x with probability 1[x in A] q(x) + 1[x = x*] (1 - q(A)), where A holds
    x* and all tokens whose negative log-probability is at most the threshold. Nothing is drawn.
    Scheme: `TopK` or `Given`, one draft per node.
    Exactness: none. **Lossy**, and for temperature 0 alone: tokens of probability exp(-threshold) and more are emitted
    whenever they are drafted. At threshold 0 a draft is kept only if it is x*, and the text is the greedy one.
    Cost: O(V) per node, for the softmax.
    Acceptance: q(A).
    Source: BiLD, arXiv 2302.07863; kssteven418/BigLittleDecoder, `T5BiLDModel` in `modeling_t5.py`, whose threshold is
    5 and whose README names 2 to 5. There, if the first draft above the threshold is x* itself, later drafts are not
    looked at; here they are. A threshold of 0 becomes 5 there.

    Args:
        threshold: the largest negative log-probability of a draft that is kept, in nats, >= 0.

    Raises:
        InvalidParameter: a threshold outside its range.
        UnpairedScheme: the scheme is neither `TopK` nor `Given`.
    """

    scheme: Scheme = TopK()
    threshold: float = 3.0
    lossless = False
    most_drafts = 1
    greedy_only = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, (TopK, Given), "Rollback")
        require_number("threshold", self.threshold, "a number of nats >= 0", lambda value: 0 <= value < inf)

    @property
    def name(self) -> str:
        """Its word and its threshold."""
        return f"rollback:{self.threshold:g}"

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Follow the chain as long as its tokens are kept; no random number is used.

        Raises:
            UnpairedScheme: a node has several drafts.
        """
        require_few(self, draft.tree.topology.width)
        children, drafted = draft.tree.children, draft.tree.tokens

        def decide(rows: Tensor, nodes: Tensor, _: int) -> tuple[Tensor, Tensor]:
            law, below = target_probs[rows, nodes], children[rows, nodes]
            token, child = law.argmax(dim=-1), drafted[rows.unsqueeze(-1), below]
            likely = (child == token.unsqueeze(-1)) | (-law.gather(-1, child).log() <= self.threshold)
            kept = likely & (below >= 0)
            return kept.int().argmax(dim=-1).where(kept.any(dim=-1), -1), token

        path, _, token = walk(draft.tree, decide)
        return Verdict(path, (path >= 0).sum(dim=-1), token)

"""Block verification: the optimal rule for a chain of drafts."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from polydraft.machine_code import compiled
from polydraft.probs import Noise
from polydraft.schemes import IID, Scheme, require_drawn
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.law import divided, require_few
from polydraft.verifiers.nodes.speculative import SpeculativeSampling
from polydraft.verifiers.selection.ordered import Flags, Numbers, Places, numbers
from polydraft.verifiers.trees.certain import certain_verdict
from polydraft.verifiers.trees.emission import plain
from polydraft.verifiers.trees.law import PathLaw
from polydraft.verifiers.trees.trials import Division, divided_by, first_success, trials
from polydraft.verifiers.trees.walk import verdict_of

Rows = NDArray[np.floating]


@dataclass(frozen=True)
class BlockVerification:
    """Accept the longest beginning of a chain x_1 ... x_L whose trial succeeds, tried from its end.

    Rule: with a_0 = 1 and a_i = min(1, a_{i-1} target(x_i) / draft(x_i)), the first i drafts are kept with probability
    Z_i / (Z_i + 1 - a_i), where Z_i = sum_x (a_i target(x) - draft(x))+ with the rows after x_i; all L with probability
    a_L. After i drafts the next token is drawn from norm((a_i target - draft)+), after L from the target.
    Scheme: any of which one draft per node is an independent draw from the node's row, the first where it has several.
    Exactness: theorem 1 of the source.
    Cost: O(K) per node.
    Acceptance: the mean length is the largest that any rule reaches on a chain (theorem 2 of the source).
    Source: arXiv 2403.10444, algorithm 2.

    Raises:
        UnpairedScheme: the scheme's single drafts are certain, or not independent; or a node has more than one draft.
    """

    scheme: Scheme = IID()
    name = "block verification"
    most_drafts = 1
    lossless = True
    best_alone = True

    def __post_init__(self) -> None:
        require_drawn(self.scheme, "Block verification")

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Keep the longest beginning that succeeds."""
        if draft.tree.tokens.shape[-1] == 1:
            return plain(target_probs, noise)
        require_few(self, draft.tree.topology.width)
        certain = certain_verdict(draft, target_probs)
        if certain:
            return certain
        if draft.whole and target_probs.device.type == "cpu":
            return by_rows(draft, target_probs, noise)
        return first_success(trials(draft, target_probs, self._divide), draft, target_probs, noise)

    def path_law(self, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> PathLaw:
        """Return the law of the verdict given the draft."""
        require_few(self, draft.tree.topology.width)
        return trials(draft, target_probs, self._divide).law(draft.tree.topology.post_order)

    def _divide(
        self,
        drafts: Int[Tensor, "b f 1"],
        draft_probs: Float[Tensor, "*rows A"],
        target_probs: Float[Tensor, "b f A"],
        scale: Float[Tensor, "b f"],
    ) -> Division:
        """Divide the mass as speculative sampling does: on a chain, its lift from the leaves up is this rule."""
        mass = scale.unsqueeze(-1) * target_probs
        row = draft_probs if draft_probs.dim() == mass.dim() else draft_probs[..., 0, :]
        return divided_by(*divided(SpeculativeSampling(), drafts, row, mass), mass, scale)


def by_rows(draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
    """Return the verdict of the nodes' trials for a chain that was drawn from whole rows, on a CPU, from its end.

    Nothing is put in the order of a list, and where the whole chain is kept no row but the last is read. That takes a
    tenth of the time of `trials` with 8,192 tokens (docs/log.md), which was 6 % of a step.
    """
    rows = draft.probs if draft.probs.dim() == 3 else draft.probs[:, :, 0]
    uniforms, places = numbers(noise.uniform(target_probs.shape[1] + 2)), draft.atoms[:, 1:].clamp_min(0)
    tables = (table.numpy() for table in (places, draft.tree.valid[:, 1:], rows, target_probs))
    ends = [_longest(*row) for row in zip(*tables, uniforms, strict=True)]
    return verdict_of([([*range(1, length + 1)], token) for length, token in ends], places.shape[1])


@compiled
def _longest(places: Places, there: Flags, draft: Rows, target: Rows, uniforms: Numbers) -> tuple[int, int]:
    """Return the longest beginning whose trial succeeds, and the token that follows.

    Args:
        places: the tokens of the chain, one to a node below the root.
        there: which of them are drafted.
        draft, target: the rows at the nodes.
        uniforms: for a token after the whole chain, for one after part of it, and for the trials.
    """
    size, scale, left = len(places), np.ones(len(places) + 1), 0.0
    for i in range(size):
        drawn = np.float64(draft[i, places[i]])
        ratio = target[i, places[i]] / drawn if there[i] and drawn > 0 else 0.0
        scale[i + 1] = min(scale[i] * ratio, 1.0)
    length, weights = size, target[size].astype(np.float64)
    if uniforms[2 + size] >= scale[size]:
        while length and (length == size or uniforms[2 + length] * (left + 1 - scale[length]) >= left):
            length -= 1
            weights = np.maximum(scale[length] * target[length] - draft[length] * there[length], 0.0)
            left = weights.sum()
        if left <= 0:  # for rounding
            weights = target[length].astype(np.float64)
    sums: Numbers = np.cumsum(weights)
    point = sums[-1] * uniforms[0 if length == size else 1]
    token = int((sums <= point).sum())
    return length, min(token, int(np.nonzero(weights)[0][-1]))  # rounding may leave the point at the very end

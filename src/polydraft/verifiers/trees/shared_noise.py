"""Shared noise: the text for a seed is the same whatever drafts it, or whether anything does."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.probs import Noise
from polydraft.schemes import Coupled, Scheme, check_scheme
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.trees.lifts import walk


@dataclass(frozen=True)
class SharedNoise:
    """Emit the tokens that the target draws from noise of its own, and keep the drafts that guessed them.

    Rule: token i at position t of the text has an exponential time S_i that depends on (seed, t, i) and nothing else.
    The token at t is y = argmin S_i / target_i. A draft is accepted if it is y; there is no residual.
    Scheme: any is exact, since the drafts do not enter the text. `Coupled` drafts, the k smallest S_i / draft_i of the
    same noise, guess best; n-gram drafts are verified with `SharedNoise(Given())`.
    Exactness: y is a draw from the target because S_i / target_i are clocks with the target's rates, independent of
    all earlier positions.
    Reproducibility: the text is a function of seed, prompt, target and sampling parameters. It does not depend on the
    drafter, its tree or its number of drafts, as long as the target's rows do not; on most hardware these vary in
    their last bits with the shape of a forward pass. Where every probability of two rows agrees up to a factor between
    1 / f and f, their tokens differ with probability at most (f^2 - 1) (1 - sum_i target_i^2): another clock must ring
    within a factor f^2 of the first.
    Cost: O(V) per accepted token, for its noise.
    Acceptance: with one draft sum_j 1 / sum_i max(target_i / target_j, draft_i / draft_j), at least (1 - TV) / (1 + TV)
    for total variation TV. At the embedded pair's nodes at temperature 0.8, one, two, four and eight coupled drafts are
    accepted .473, .608, .714 and .773 of the time, where recursive rejection without replacement accepts .519, .615,
    .715 and .767. Noise of its own for each draft (GLS, arXiv 2506.05632) would make the text depend on the number of
    drafts and accepts less: .471, .560, .640 and .706.
    Source: Daliri et al., arXiv 2408.07978, for one draft.
    """

    scheme: Scheme = Coupled()
    name = "shared noise"
    lossless = True

    def __post_init__(self) -> None:
        check_scheme(self.scheme, "Shared noise")

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Follow the target's own tokens down the tree as far as they were drafted."""
        children, drafted = draft.tree.children, draft.tree.tokens

        def decide(rows: Tensor, nodes: Tensor, depth: int) -> tuple[Tensor, Tensor]:
            token = (target_probs[rows, nodes] / times_of(target_probs[:, 0], depth, noise)[rows]).argmax(dim=-1)
            below = children[rows, nodes]
            match = (below >= 0) & (drafted[rows.unsqueeze(-1), below] == token.unsqueeze(-1))
            return match.int().argmax(dim=-1).where(match.any(dim=-1), -1), token

        path, _, token = walk(draft.tree, decide)
        return Verdict(path, (path >= 0).sum(dim=-1), token)


def times_of(rates: Float[Tensor, "b V"], depth: int, noise: Noise) -> Float[Tensor, "b V"]:
    """Return the times of all rows' clocks at this place in the text, if all ran at the rate one."""
    tokens = torch.arange(rates.shape[-1], device=rates.device).expand(rates.shape)
    return torch.log1p(-noise.tied(depth, tokens)).neg_().clamp_min_(torch.finfo(torch.float64).tiny)

"""A verification rule of your own: proved exact by enumeration, then used.

    python examples/own_verifier.py
    polydraft generate "def add(a, b):" --verifier examples/own_verifier.py:DrawThenLook --tree 2,1 --temperature 1

The rule draws the next token from the target, and goes on behind a draft if one happens to be that token (naive
verification of SpecInfer, arXiv 2305.09781).
"""

from dataclasses import dataclass

import torch

import polydraft
from polydraft import IID
from polydraft.conformance import check_rule
from polydraft.schemes import Scheme, require_scheme
from polydraft.verifiers import OutcomeLaw


@dataclass(frozen=True)
class DrawThenLook:
    """Keep the draft that equals a draw from the target; else emit the draw."""

    scheme: Scheme = IID()
    name = "draw, then look"
    lossless = True

    def __post_init__(self):
        """Refuse other ways of drawing drafts than independent ones."""
        require_scheme(self.scheme, (IID,), "DrawThenLook")

    def law(self, drafts, draft_probs, target_probs):
        """Return the probability that each draft is kept, and of each token where none is; absent drafts are -1."""
        repeated = (drafts.unsqueeze(-1) == drafts.unsqueeze(-2)).tril(-1).any(-1)
        counts = (drafts >= 0) & ~repeated
        places = drafts.clamp_min(0)
        kept = torch.where(counts, target_probs.gather(-1, places), 0)
        return OutcomeLaw(kept, target_probs.scatter_add(-1, places, -kept).clamp_min(0))

    def acceptance(self, draft_probs, target_probs, counts):
        """Return sum_x p(x) (1 - (1 - q(x))^k), the probability that a draw from p is among k draws from q."""
        missed = (1 - draft_probs) ** counts.unsqueeze(-1)
        return (target_probs * (1 - missed)).sum(-1)


def main() -> None:
    """Prove the rule, then write a text by it."""
    report = check_rule(DrawThenLook())
    print(f"exact: {report.exact}, largest deviation {report.deviation:.1e}")
    pair = polydraft.load_pair()
    prompt = pair.tokenizer("def add(a, b):\n", return_tensors="pt")["input_ids"]
    output = polydraft.generate(
        pair.target,
        prompt,
        drafter=pair.draft,
        verifier=DrawThenLook(),
        policy="2,1",
        temperature=1.0,
        top_k=0,
        max_new_tokens=24,
        seed=1,
    )
    print(pair.tokenizer.decode(output.sequences[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()

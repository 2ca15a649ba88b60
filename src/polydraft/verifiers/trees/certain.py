"""Verdicts without a rule: of trees without drafts, and of targets without a choice, as at temperature 0."""

from jaxtyping import Float
from torch import Tensor

from polydraft.probs import Noise
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.law import VerificationRule
from polydraft.verifiers.selection.ordered import Places
from polydraft.verifiers.traits import require_few
from polydraft.verifiers.trees.emission import plain
from polydraft.verifiers.trees.walk import verdict_of


def settled(rule: VerificationRule, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict | None:
    """Return the verdict for which no rule is needed: of trees without drafts, or of a target without a choice.

    Raises:
        UnpairedScheme: the rule is for fewer drafts at a node.
    """
    if draft.tree.tokens.shape[-1] == 1:
        return plain(target_probs, noise)
    require_few(rule, draft.tree.topology.width)
    return certain_verdict(draft, target_probs) if rule.lossless else None


def certain_verdict(draft: Draft, target_probs: Float[Tensor, "b n V"]) -> Verdict | None:
    """Follow the target's own tokens down the trees if it has no choice at any node; return None if it has.

    Every lossless rule here accepts the first copy of a certain token wherever it was drafted, so this is its verdict
    without its arithmetic. Rows are certain if their largest entry is one: the others are below rounding. They are
    looked at on a CPU only; another device would have to be waited for. There a walk over lists takes a tenth of the
    time of `walk`, which was 5 % of a step at temperature 0.
    """
    on_cpu = target_probs.device.type == "cpu"
    if not on_cpu or not all(bool((rows.amax(dim=-1) == 1).all()) for rows in (target_probs[:, :1], target_probs)):
        return None
    tree = draft.tree
    rows = zip(*(of.numpy() for of in (tree.children, tree.tokens, target_probs.argmax(dim=-1))), strict=True)
    return verdict_of([_followed(*row) for row in rows], tree.topology.height)


def _followed(children: Places, tokens: Places, target: Places) -> tuple[list[int], int]:
    """Return the nodes of one row below its root that hold the target's own tokens, and the token that follows."""
    path, node = list[int](), 0
    while True:
        child = next((below for below in children[node].tolist() if below >= 0 and tokens[below] == target[node]), None)
        if child is None:
            return path, int(target[node])
        path.append(node := child)

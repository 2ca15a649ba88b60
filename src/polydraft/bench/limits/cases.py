"""Which schemes, rules and trees the limits are measured for: two tables."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Scheme,
    TopK,
    TopThenIID,
    TopThenSample,
    WithoutReplacement,
)
from polydraft.trees import TreePolicy, parse_policy
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    ImportanceWeighted,
    KSeq,
    NaiveMatch,
    NodeVerifier,
    Optimal,
    PathVerifier,
    Race,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SpecHubRule,
    SpeculativeSampling,
    TopDown,
    TopThenSampleRule,
    TraversalVerification,
)
from polydraft.verifiers.host.rejections import average_accepted
from polydraft.verifiers.selection.ordered import numbers

MANY = 64
NAIVE = "naive match"
"""The short name of naive match."""
UNDEFINED, TOO_DEAR = "n/a", ">>"
"""Signs in place of a number: the rule takes fewer drafts; there are too many orders of rejected drafts to follow."""
AFFORDABLE = 2**24
"""The most orders of rejected drafts that are followed at a position, in about a thirtieth of a second."""
BY_TENSORS = 3
LARGEST_VOCABULARY = 2**20


@dataclass(frozen=True)
class NodeCase:
    """A rule whose acceptance rate is computed beside its scheme's optimum.

    Args:
        label: the rule's short name in tables.
        rule: the rule, with the scheme that it verifies.
        most: the largest number of drafts for which the rule is defined.
    """

    label: str
    rule: NodeVerifier
    most: int = MANY

    def gap_at(self, k: int, shortlist: int) -> str:
        """Return why there is no number for so many drafts, as the sign that tables show; empty if there is one."""
        if k > MANY:
            return TOO_DEAR
        if k > self.most:
            return UNDEFINED
        orders = min(shortlist, LARGEST_VOCABULARY) ** (k - 1)
        dear = isinstance(self.rule, RecursiveRejectionWithoutReplacement) and orders > AFFORDABLE
        return TOO_DEAR if dear else ""

    @property
    def scheme(self) -> Scheme:
        """The rule's scheme."""
        return self.rule.scheme

    def acceptance(
        self, draft_probs: Float[Tensor, "*b A"], target_probs: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b"]:
        """Return the rule's acceptance rate.

        The optimal rule's `acceptance` is the optimum by its formula; to find what it really accepts, its marginals
        are added up. Recursive rejection of many drafts without replacement is computed on the host, in a fiftieth of
        the time.
        """
        if isinstance(self.rule, RecursiveRejectionWithoutReplacement) and int(counts.max()) > BY_TENSORS:
            rows = zip(draft_probs, target_probs, counts.tolist(), strict=True)
            found = [average_accepted(numbers(draft), numbers(target), count).sum() for draft, target, count in rows]
            return torch.tensor(found, dtype=draft_probs.dtype, device=draft_probs.device)
        if isinstance(self.rule, Optimal):
            return self.rule.marginal(draft_probs, target_probs, counts).sum(dim=-1)
        return self.rule.acceptance(draft_probs, target_probs, counts)


@dataclass(frozen=True)
class TreeCase:
    """A tree rule whose expected accepted length is computed on trees of some shapes.

    Args:
        label: the rule's short name in tables.
        verifier: the rule, with the scheme that the trees are drawn by.
        chain: whether it is for chains, one draft per node; other cases are for trees that branch.
    """

    label: str
    verifier: PathVerifier
    chain: bool = False


NODE_CASES = (
    NodeCase(NAIVE, NaiveMatch(IID())),
    NodeCase("recursive rejection", RecursiveRejection()),
    NodeCase("k-seq", KSeq()),
    NodeCase("importance weighted", ImportanceWeighted()),
    NodeCase("race", Race(IID())),
    NodeCase("optimal rule", Optimal(IID())),
    NodeCase(NAIVE, NaiveMatch(WithoutReplacement())),
    NodeCase("recursive rejection", RecursiveRejectionWithoutReplacement()),
    NodeCase("optimal rule", Optimal(WithoutReplacement())),
    NodeCase("optimal rule", Optimal(ConditionalPoisson())),
    NodeCase("top then sample", TopThenSampleRule()),
    NodeCase("optimal rule", Optimal(TopThenSample())),
    NodeCase("spechub", SpecHubRule(), most=2),
    NodeCase("race", Race(TopThenIID(1))),
    NodeCase("optimal rule", Optimal(TopThenIID(1))),
    NodeCase(NAIVE, NaiveMatch(TopK())),
)

TREE_CASES = (
    TreeCase("token by token", TopDown(SpeculativeSampling()), chain=True),
    TreeCase("block verification", BlockVerification(), chain=True),
    TreeCase("top-down naive", TopDown(NaiveMatch(TopK())), chain=True),
    TreeCase("top-down recursive", TopDown(RecursiveRejection())),
    TreeCase("traversal", TraversalVerification(IID())),
    TreeCase("top-down optimal", TopDown(Optimal(IID()))),
    TreeCase("bottom-up optimal", BottomUp(Optimal(IID()))),
    TreeCase("top-down recursive", TopDown(RecursiveRejectionWithoutReplacement())),
    TreeCase("traversal", TraversalVerification(WithoutReplacement())),
    TreeCase("top-down optimal", TopDown(Optimal(WithoutReplacement()))),
    TreeCase("bottom-up optimal", BottomUp(Optimal(WithoutReplacement()))),
    TreeCase("top-down own rule", TopDown(TopThenSampleRule())),
    TreeCase("bottom-up own rule", BottomUp(TopThenSampleRule())),
    TreeCase("bottom-up optimal", BottomUp(Optimal(TopThenSample()))),
    TreeCase("top-down naive", TopDown(NaiveMatch(TopK()))),
)

TREE_SHAPES = ("chain:4", "2,2,1", "4,2,1")


def is_chain(policy: TreePolicy) -> bool:
    """Tell whether every node of the policy's trees has at most one child."""
    return policy.shape.max_children <= 1


def tree_policies(shapes: tuple[str, ...]) -> dict[str, TreePolicy]:
    """Return the policies that the shapes' names stand for.

    Raises:
        InvalidParameter: a name is none of a shape.
    """
    return {name: parse_policy(name) for name in shapes}

"""Expected accepted lengths of tree rules, on trees that the draft model grows along a generated text."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import Noise, SamplingParams, to_probs
from polydraft.schemes import Scheme
from polydraft.trees import Draft, Frontier, TreePolicy, grow
from polydraft.verifiers import FAMILIES, dual_values, expected_accepted
from polydraft_lab.limits.cases import TreeCase, bounds_on, is_chain
from polydraft_lab.limits.positions import Sample, draft_rows
from polydraft_lab.limits.reading import Reading, TreesBelow

ROOM = 2**25
"""The most numbers in one tensor of target rows."""

Accepted = dict[str, dict[str, float]]
"""Summed over positions: scheme -> rule -> expected accepted drafts."""


def accepted_on_trees(
    sample: Sample,
    roots: Int[Tensor, "b"],
    policy: TreePolicy,
    cases: Sequence[TreeCase],
    temperatures: tuple[float, float],
    shortlist_size: int,
    seed: int,
) -> Accepted:
    """Grow one tree per root and scheme, and sum up what the scheme's rules accept of them on average.

    Only the trees are drawn; the acceptance of each is computed. All rules of a scheme see the same trees, and so do
    bounds on any exact rule where the trees were planned and the drafts are drawn.

    Args:
        sample: the text.
        roots: places in the text of the trees' roots.
        policy: the trees' shape.
        cases: the rules; those for another kind of shape are left out.
        temperatures: the target's and the draft's.
        shortlist_size: how many tokens the drafts are drawn from.
        seed: fixes the trees.
    """
    fitting = sorted((case for case in cases if case.chain == is_chain(policy)), key=_scheme_name)
    result: Accepted = {}
    for name, group in groupby(fitting, key=_scheme_name):
        rules = list(group)
        sums = dict.fromkeys((case.label for case in rules), 0.0)
        for part in roots.split(max(1, ROOM // (policy.shape.size * sample.target.logits.shape[-1]))):
            noise = Noise.from_seed(seed + int(part[0]), len(part))
            draft = draw_trees(sample, part, policy, rules[0].verifier.scheme, temperatures[1], shortlist_size, noise)
            rows = score_trees(sample, part, draft, temperatures[0])
            for case in rules:
                sums[case.label] += float(expected_accepted(case.verifier, draft, rows).sum())
            if bounds := bounds_on(policy, rules[0].verifier.scheme):
                draft = rows_at_leaves(sample, part, draft, temperatures[1], shortlist_size)
                for bound, family in zip(bounds, FAMILIES, strict=True):
                    values = dual_values(draft, rows, rules[0].verifier.scheme, family)
                    sums[bound] = sums.get(bound, 0.0) + float(values.sum())
        result[name] = sums
    return result


def _scheme_name(case: TreeCase) -> str:
    return case.verifier.scheme.name


def draw_trees(
    sample: Sample,
    roots: Int[Tensor, "b"],
    policy: TreePolicy,
    scheme: Scheme,
    temperature: float,
    shortlist_size: int,
    noise: Noise,
) -> Draft:
    """Grow a tree below each root with the draft model."""
    branches = TreesBelow(sample.draft, roots, policy.shape.size)
    shared = sample.target.logits.shape[-1]

    def propose(frontier: Frontier) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f K"]]:
        depth = torch.full_like(frontier.tokens, frontier.depth)
        logits = branches.score(frontier.nodes, frontier.tokens, depth, frontier.ancestors)
        return draft_rows(logits[..., :shared], temperature, shortlist_size)

    return grow(sample.tokens[roots], policy, scheme, propose, noise, trusted=True)


def rows_at_leaves(
    sample: Sample, roots: Int[Tensor, "b"], draft: Draft, temperature: float, shortlist_size: int
) -> Draft:
    """Give leaves above the last depth draft rows too: prices follow from texts, which may also have drafts there."""
    logits = _scored(sample.draft, roots, draft)[..., : sample.target.logits.shape[-1]]
    listed, probs = draft_rows(logits, temperature, shortlist_size)
    bare = draft.probs.sum(dim=-1, keepdim=True) == 0
    return replace(draft, shortlist=listed.where(bare, draft.shortlist), probs=probs.where(bare, draft.probs))


def _scored(reading: Reading, roots: Int[Tensor, "b"], draft: Draft) -> Float[Tensor, "b n V"]:
    tree = draft.tree
    branches = TreesBelow(reading, roots, tree.tokens.shape[1])
    return branches.score(range(tree.tokens.shape[1]), tree.tokens, tree.depth, tree.ancestors)


def score_trees(sample: Sample, roots: Int[Tensor, "b"], draft: Draft, temperature: float) -> Float[Tensor, "b n V"]:
    """Return the target's row at every node, in one forward pass."""
    return to_probs(_scored(sample.target, roots, draft), SamplingParams(temperature=temperature))


def every(sample: Sample, step: int) -> Int[Tensor, "b"]:
    """Return the roots of every `step`-th position, the first included."""
    return torch.arange(sample.first, len(sample.tokens), step, device=sample.tokens.device)


def most_room(policies: Sequence[TreePolicy], positions: int, step: int) -> int:
    """Return how many nodes are scored below a text at once, at most."""
    roots = -(-positions // step) if step else 0
    return roots * max((policy.shape.size for policy in policies), default=0)

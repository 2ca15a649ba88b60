"""Proof of a tree rule on trees of depth two: all draft trees are listed, and for each the law of its verdict.

They grow in small worlds: laws of a target and a draft that depend on the path, over four tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import exp, inf, prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

import polydraft.conformance.proved_rules as proved_rules
from polydraft.conformance.evidence import Evidence, JointLaw, distance
from polydraft.conformance.node_rules import EXACT, without_infinite
from polydraft.conformance.proved_rules import label
from polydraft.errors import InvalidParameter, UnpairedScheme, is_whole
from polydraft.probs import Noise, normalised, sample
from polydraft.schemes import Scheme, enumerate_drafts
from polydraft.trees import Draft, Frontier, TokenTree, Topology, Widths, grow
from polydraft.verifiers import PathLaw, PathVerifier, TreeVerifier

FALSE_ALARM = 1e-6
SAMPLES = 2048
VOCABULARY, LISTED = 4, 3
KINDS = ("generic", "zeros", "near", "generic again")


@dataclass(frozen=True, eq=False)
class World:
    """The target's law after 0, 1 and 2 tokens, and the draft's after 0 and 1 on shortlists of three tokens.

    Args:
        name: what is special about it.
        target: "V", "V V" and "V V V"; the last axis is the next token.
        shortlist: "K" and "V K": token ids in no particular order.
        draft: "K" and "V K": probabilities on the shortlists.
    """

    name: str
    target: tuple[Float[Tensor, "..."], ...]
    shortlist: tuple[Int[Tensor, "..."], ...]
    draft: tuple[Float[Tensor, "..."], ...]

    @property
    def joint(self) -> Float[Tensor, "V V V"]:
        """The target's law of three tokens."""
        first, second, third = self.target
        return first.view(-1, 1, 1) * second.unsqueeze(-1) * third

    def propose(self, frontier: Frontier) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f K"]]:
        """Give the draft laws of a frontier, for `grow`."""
        if frontier.depth:
            return self.shortlist[1][frontier.tokens], self.draft[1][frontier.tokens]
        places = (*frontier.tokens.shape, LISTED)
        return self.shortlist[0].expand(places), self.draft[0].expand(places)

    def rows(self, tree: TokenTree) -> Float[Tensor, "b n V"]:
        """Return the target's row at every node of trees of depth two."""
        above = tree.tokens.gather(-1, tree.parents.clamp_min(0))
        deepest = self.target[2][above, tree.tokens]
        depth = tree.depth.unsqueeze(-1)
        return torch.where(depth == 0, self.target[0], torch.where(depth == 1, self.target[1][tree.tokens], deepest))


def worlds() -> list[World]:
    """Return the worlds: generic ones, one whose target has zeros, one whose draft is close to the target."""
    return [_world(kind, seed) for seed, kind in enumerate(KINDS)]


def _world(kind: str, seed: int) -> World:
    uniforms = Noise.from_seed(seed, 1).uniform(3 * VOCABULARY**3)[0]

    def law(first: int, *shape: int) -> Tensor:
        mass = uniforms[first : first + prod(shape)].view(shape) ** 3 + 0.01
        mass = mass * (mass > 0.05) if kind == "zeros" else mass
        return normalised(mass, torch.full_like(mass, 1 / VOCABULARY))

    v = VOCABULARY
    target = (law(0, v), law(v, v, v), law(v + v * v, v, v, v))
    listed = uniforms[100 : 100 + v + v * v].view(v + 1, v).argsort(dim=-1)[:, :LISTED]
    drafted = law(130, v + 1, v).clamp_min(0.001)[:, :LISTED]
    if kind == "near":
        drafted = 0.2 * drafted + torch.cat([target[0].unsqueeze(0), target[1]]).gather(-1, listed)
    drafted = drafted / drafted.sum(dim=-1, keepdim=True)
    return World(kind, target, (listed[0], listed[1:]), (drafted[0], drafted[1:]))


def every_tree(world: World, scheme: Scheme, widths: tuple[int, int]) -> tuple[Draft, Float[Tensor, "b"]]:
    """List every draft tree with these numbers of children by depth as one batch, and their probabilities."""
    found = list(_trees(world, scheme, widths))
    atoms = torch.tensor([tree for tree, _ in found])
    return _as_draft(world, widths, atoms), torch.tensor([chance for _, chance in found], dtype=torch.float64)


def _trees(world: World, scheme: Scheme, widths: tuple[int, int]) -> Iterator[tuple[list[int], float]]:
    after = [_drafts(scheme, law, widths[1]) for law in world.draft[1]]
    for children, chance in _drafts(scheme, world.draft[0], widths[0]):
        nothing = [((-1,) * widths[1], 1.0)]
        below = [after[int(world.shortlist[0][child])] if child >= 0 else nothing for child in children]
        for leaves in product(*below):
            atoms = [-1, *children, *(atom for drafts, _ in leaves for atom in drafts)]
            yield atoms, chance * prod(share for _, share in leaves)


def _drafts(scheme: Scheme, law: Float[Tensor, " K"], k: int) -> list[tuple[tuple[int, ...], float]]:
    atoms, chance = enumerate_drafts(scheme, law, k)
    return list(zip(map(tuple, atoms.tolist()), chance.tolist(), strict=True))


def _as_draft(world: World, widths: tuple[int, int], atoms: Int[Tensor, "b n"]) -> Draft:
    """Return the trees whose nodes, breadth first, have these places in their parents' shortlists."""
    last = 1 + widths[0]
    parents = torch.tensor([-1, *[0] * widths[0], *(node for node in range(1, last) for _ in range(widths[1]))])
    tokens = torch.zeros_like(atoms)
    tokens[:, 1:last] = world.shortlist[0][atoms[:, 1:last].clamp_min(0)]
    shortlist = torch.full((*atoms.shape, LISTED), -1)
    probs = torch.zeros(shortlist.shape, dtype=torch.float64)
    shortlist[:, 0], probs[:, 0] = world.shortlist[0], world.draft[0]
    shortlist[:, 1:last], probs[:, 1:last] = world.shortlist[1][tokens[:, 1:last]], world.draft[1][tokens[:, 1:last]]
    tokens[:, last:] = shortlist[:, parents[last:]].gather(-1, atoms[:, last:].clamp_min(0).unsqueeze(-1)).squeeze(-1)
    valid = (atoms >= 0) | (parents < 0)
    tree = TokenTree(tokens, Topology(parents.repeat(len(atoms), 1)), valid)
    return Draft(tree, atoms, shortlist, probs, most_children=max(widths))


@dataclass(frozen=True)
class TreeReport:
    """What the enumeration of a tree rule found, or sampling where the rule's law is not known.

    Args:
        rule: its name.
        scheme: the name of its scheme.
        lossless: whether it claims to be.
        widths: the numbers of children at the root and at depth one.
        deviation: the largest deviation of the joint law of three tokens from the target's, or of a verdict's law
            from being a law; of sampled rules the total variation, chance included.
        worst: the world where it is.
        accepted: the mean number of accepted drafts, for each world.
        samples: texts sampled for each world; 0 if the rule was enumerated.
        e_value: the evidence against the target's law in the samples (see `conformance.evidence`).
    """

    rule: str
    scheme: str
    lossless: bool
    widths: tuple[int, int]
    deviation: float
    worst: str
    accepted: tuple[float, ...]
    samples: int = 0
    e_value: float = 1.0

    @property
    def exact(self) -> bool:
        """Whether the output law is the target's: to rounding, or as far as samples tell."""
        return self.e_value < 1 / FALSE_ALARM if self.samples else self.deviation <= EXACT

    @property
    def failed(self) -> bool:
        """Whether a rule that claims to be lossless is not."""
        return self.lossless and not self.exact

    def as_dict(self) -> dict[str, object]:
        """Return everything, for JSON; a deviation that is not finite becomes None."""
        return without_infinite(asdict(self)) | {"exact": self.exact, "failed": self.failed}


def check_tree_rule(rule: TreeVerifier, widths: tuple[int, int] | None = None) -> TreeReport:
    """Compare the law of three tokens under a tree rule with the target's, on trees of depth two.

    Emitted are the path's tokens and the next one; those still missing of the three come from the target, as they do
    in the next step of decoding. A rule with a `path_law` is enumerated over all draft trees. Any other is sampled
    2048 times per world, from drafting to verdict, and tested with false-alarm rate 1e-6.

    Args:
        rule: your rule, or one of `polydraft.verifiers`.
        widths: the numbers of children at the root and at depth one; None is (2, 2), or (1, 1) for rules of chains.

    Raises:
        InvalidParameter: a width outside 1 to 3.
        UnpairedScheme: the rule cannot verify trees of these widths.
    """
    if widths is None:
        try:
            return check_tree_rule(rule, (2, 2))
        except UnpairedScheme:
            return check_tree_rule(rule, (1, 1))
    if not (isinstance(widths, tuple) and len(widths) == 2 and all(is_whole(one) and 1 <= one <= 3 for one in widths)):
        raise InvalidParameter(f"widths must lie in 1 to 3, since all trees are listed, but are {widths!r}.")
    if not isinstance(rule, PathVerifier):
        return _sampled(rule, widths)
    found = [(world.name, *_measured(rule, world, widths)) for world in worlds()]
    worst, deviation, _ = max(found, key=lambda one: one[1])
    accepted = tuple(mean for _, _, mean in found)
    return TreeReport(label(rule), rule.scheme.name, rule.lossless, widths, deviation, worst, accepted)


def tree_matrix(
    rules: Sequence[TreeVerifier] | None = None, *, on_progress: Callable[[int, int], None] | None = None
) -> list[TreeReport]:
    """Check every tree rule; None is all of the catalogue. See `check_tree_rule`."""
    rules = proved_rules.tree_rules() if rules is None else rules
    reports: list[TreeReport] = []
    for rule in rules:
        reports.append(check_tree_rule(rule))
        if on_progress is not None:
            on_progress(len(reports), len(rules))
    return reports


def _measured(rule: PathVerifier, world: World, widths: tuple[int, int]) -> tuple[float, float]:
    draft, chance = every_tree(world, rule.scheme, widths)
    rows = world.rows(draft.tree)
    law = rule.path_law(draft, rows)
    texts = _three_tokens(world, draft, law.end.unsqueeze(-1) * law.next_token(draft, rows))
    off = (torch.einsum("b,bxyz->xyz", chance, texts) - world.joint).abs().max()
    deviation = float(torch.stack([off, _defect(law, draft)]).nan_to_num(inf).max())
    return deviation, float(chance @ law.accepted(draft.tree))


def _three_tokens(world: World, draft: Draft, emitted: Float[Tensor, "b n V"]) -> Float[Tensor, "b V V V"]:
    """Return each tree's law of three tokens, from the mass of ending at each node and emitting each token there."""
    tree, (_, second, third) = draft.tree, world.target
    tokens, above = tree.tokens, tree.tokens.gather(-1, tree.parents.clamp_min(0))
    texts = emitted[:, 0].view(*emitted[:, 0].shape, 1, 1) * second.unsqueeze(-1) * third
    rows = torch.arange(len(emitted))
    for node in range(1, tokens.shape[-1]):
        there = emitted[:, node] * tree.valid[:, node : node + 1]
        deep = tree.depth[:, node] == 2
        two = there.unsqueeze(-1) * third[tokens[:, node]]
        texts[rows, tokens[:, node]] += two * ~deep.view(-1, 1, 1)
        texts[rows, above[:, node], tokens[:, node]] += there * deep.unsqueeze(-1)
    return texts


def _defect(law: PathLaw, draft: Draft) -> Tensor:
    """Return how far the verdicts' laws are from being laws: sums of one, nothing negative, only valid nodes."""
    parts = [(law.end.sum(dim=-1) - 1).abs(), -law.end, -law.rest, law.end * ~draft.tree.valid]
    return torch.stack([part.max() for part in parts]).max()


def _sampled(rule: TreeVerifier, widths: tuple[int, int]) -> TreeReport:
    texts = [_sampled_texts(rule, world, widths) for world in worlds()]
    laws = [JointLaw(world.joint) for world in worlds()]
    counts = [law.counted(tokens) for law, (tokens, _) in zip(laws, texts, strict=True)]
    distances = [float(distance(seen, law.probs.flatten())) for seen, law in zip(counts, laws, strict=True)]
    worst = max(range(len(texts)), key=lambda place: distances[place])
    return TreeReport(
        rule=label(rule),
        scheme=rule.scheme.name,
        lossless=rule.lossless,
        widths=widths,
        deviation=distances[worst],
        worst=worlds()[worst].name,
        accepted=tuple(accepted for _, accepted in texts),
        samples=SAMPLES,
        e_value=exp(min(700.0, float(Evidence(laws).log_e(counts)))),
    )


def _sampled_texts(rule: TreeVerifier, world: World, widths: tuple[int, int]) -> tuple[Int[Tensor, "b 3"], float]:
    """Draft and verify with different seeds; return the first three tokens and the mean number of accepted drafts."""
    noise, spare = Noise.from_seed(0, SAMPLES).at(0), Noise.from_seed(1, 1)
    draft = grow(torch.zeros(SAMPLES, dtype=torch.int64), Widths(widths), rule.scheme, world.propose, noise)
    verdict = rule.verify(draft, world.rows(draft.tree), noise)
    tokens = torch.nn.functional.pad(verdict.tokens(draft.tree), (0, 2), value=-1)[:, :3]
    for place in (1, 2):
        law = world.target[place][tuple(tokens[:, :place].T)]
        fresh = sample(law, spare.uniform(SAMPLES)[0])
        tokens[:, place] = torch.where(tokens[:, place] < 0, fresh, tokens[:, place])
    return tokens, float(verdict.length.double().mean())

"""Proof of a tree rule on trees of depth two: all draft trees are listed, and for each the law of its verdict."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import exp, inf, isfinite

import torch
from jaxtyping import Float, Int
from torch import Tensor

import polydraft.conformance.proved_rules as proved_rules
from polydraft.conformance.evidence import Evidence, JointLaw
from polydraft.conformance.node_rules import EXACT
from polydraft.conformance.power import distance
from polydraft.conformance.proved_rules import label
from polydraft.conformance.worlds import VOCABULARY, World, every_tree, worlds
from polydraft.errors import InvalidParameter, UnpairedScheme, is_whole
from polydraft.probs import Noise, sample
from polydraft.trees import Draft, Widths, grow
from polydraft.verifiers import PathLaw, PathVerifier, TreeVerifier

FALSE_ALARM = 1e-6
SAMPLES = 2048


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
        values: dict[str, object] = {**asdict(self), "exact": self.exact, "failed": self.failed}
        return values | {"deviation": self.deviation if isfinite(self.deviation) else None}


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
    if not _are_widths(widths):
        raise InvalidParameter(f"widths must lie in 1 to 3, since all trees are listed, but are {widths!r}.")
    if not isinstance(rule, PathVerifier):
        return _sampled(rule, widths)
    found = [(world.name, *_measured(rule, world, widths)) for world in worlds()]
    worst, deviation, _ = max(found, key=lambda one: one[1])
    accepted = tuple(mean for _, _, mean in found)
    return TreeReport(label(rule), rule.scheme.name, rule.lossless, widths, deviation, worst, accepted)


def _are_widths(value: object) -> bool:
    """Tell whether a value is two numbers of children that can be listed."""
    return isinstance(value, tuple) and len(value) == 2 and all(is_whole(one) and 1 <= one <= 3 for one in value)


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
    """Return the largest deviation and the mean number of accepted drafts."""
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
    counts = [_counted(tokens) for tokens, _ in texts]
    laws = [JointLaw(world.joint) for world in worlds()]
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


def _counted(tokens: Int[Tensor, "b 3"]) -> Float[Tensor, " x"]:
    places = (tokens * torch.tensor([VOCABULARY**2, VOCABULARY, 1])).sum(dim=-1)
    return places.bincount(minlength=VOCABULARY**3).double()

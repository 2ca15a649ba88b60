"""Proof of a node rule by enumeration: all drafts of a scheme, and for each the rule's law of the emitted token."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import inf, isfinite

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import polydraft.conformance.proved_rules as proved_rules
from polydraft.conformance.proved_rules import RANDOM, Case, NodeRule, cases, label
from polydraft.errors import InvalidParameter, UnpairedScheme, is_whole
from polydraft.schemes import Scheme
from polydraft.verifiers import NodeVerifier, OutcomeLaw

EXACT = 1e-9
"""The largest deviation of a probability that passes for rounding."""


@dataclass(frozen=True)
class Deviation:
    """How far one case is from what it should be: the case, its number of drafts, and the largest deviation."""

    case: str
    drafts: int
    size: float


@dataclass(frozen=True)
class RuleReport:
    """What the enumeration of a rule found.

    Args:
        rule: its name.
        scheme: the name of the scheme that the drafts were enumerated for.
        paired: whether that is the scheme the rule is made for.
        lossless: whether the rule claims to be.
        drafts: the largest number of drafts per node that was enumerated.
        deviation: the largest deviation of the output law from the target, or of an outcome law from being a law.
        worst: the cases that deviate most, largest first.
        acceptance: for 1, 2, ... drafts, the probability of accepting a draft, averaged over the random rows.
        optimum: the same for the best rule that there can be for the scheme.
        gap: the largest shortfall from the optimum, over all cases.
        excess: the largest excess over it, which only a biased rule can have.
        misstated: the largest difference between the rule's own `acceptance`, if it has one, and the enumerated one.
        refusal: what the rule said to drafts of a scheme that it is not made for; then all else is empty.
    """

    rule: str
    scheme: str
    paired: bool
    lossless: bool
    drafts: int = 0
    deviation: float = inf
    worst: tuple[Deviation, ...] = ()
    acceptance: tuple[float, ...] = ()
    optimum: tuple[float, ...] = ()
    gap: float = inf
    excess: float = 0.0
    misstated: float = 0.0
    refusal: str = ""

    @property
    def exact(self) -> bool:
        """Whether the output law is the target's, to rounding."""
        return self.deviation <= EXACT

    @property
    def failed(self) -> bool:
        """Whether a rule that claims to be lossless is not, with the drafts that it is made for."""
        return self.paired and self.lossless and not self.exact

    def as_dict(self) -> dict[str, object]:
        """Return everything, for JSON; numbers that are not finite become None."""
        return without_infinite(asdict(self)) | {"exact": self.exact, "failed": self.failed}


@dataclass(frozen=True, eq=False)
class _Enumeration:
    """All drafts of all cases in one batch.

    Args:
        of_case: to which case each entry belongs.
        probability: of the drafts in their case.
    """

    of_case: Int[Tensor, " m"]
    drafts: Int[Tensor, "m k"]
    probability: Float[Tensor, " m"]
    draft_probs: Float[Tensor, "m *J A"]
    target_probs: Float[Tensor, "m A"]

    def averaged(self, values: Float[Tensor, "m *x"], over: int) -> Float[Tensor, "c *x"]:
        """Return the expectation over the drafts in each case."""
        weighted = self.probability.view(-1, *[1] * (values.dim() - 1)) * values
        return values.new_zeros(over, *values.shape[1:]).index_add(0, self.of_case, weighted)


@dataclass(frozen=True, eq=False)
class _Measured:
    """Per case: the deviation, the acceptance rate, the optimum, and the error of the stated acceptance rate."""

    deviation: Float[Tensor, " c"]
    acceptance: Float[Tensor, " c"]
    optimum: Float[Tensor, " c"]
    misstated: Float[Tensor, " c"]


def check_rule(
    rule: NodeRule, k: int = 3, *, scheme: Scheme | None = None, rows: Sequence[Case] | None = None
) -> RuleReport:
    """Enumerate a node rule with 1 to k drafts and compare its output law with the target.

    For every case and every number of drafts the law of the emitted token, sum over all drafts of
    Pr[drafts] law(. | drafts), is compared with the target; a rule is exact if they agree. The acceptance rate is
    compared with the scheme's optimum 1 + min_H [target(H) - Pr[all drafts in H]], here by going through all sets H.

    Args:
        rule: your rule, or one of `polydraft.verifiers`.
        k: the largest number of drafts; rules that take fewer are enumerated as far as they go (`RuleReport.drafts`).
        scheme: enumerate the drafts of this scheme instead of the rule's own.
        rows: the cases; None is `conformance.cases()`.

    Raises:
        InvalidParameter: k is outside 1 to 5.
        UnpairedScheme: the rule refuses even one draft.
    """
    if not is_whole(k) or not 1 <= k <= 5:
        raise InvalidParameter(f"k must lie in 1 to 5, since all drafts are listed, but is {k!r}.")
    drawn = scheme or rule.scheme
    rows = cases() if rows is None else rows
    found: list[_Measured] = []
    for count in range(1, k + 1):
        try:
            found.append(_measured(rule, drawn, count, rows))
        except (UnpairedScheme, InvalidParameter):
            if count == 1:
                raise
            break
    return _report(rule, drawn, rows, found)


def matrix(
    rules: Sequence[NodeRule] | None = None,
    *,
    k: int = 3,
    all_pairs: bool = False,
    rows: Sequence[Case] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[RuleReport]:
    """Check every rule with the drafts it is made for, and with `all_pairs` with those of all other schemes too.

    Args:
        rules: None is every rule of the package, of the catalogue.
        k: the largest number of drafts.
        all_pairs: also enumerate rules with drafts that they are not made for; most deviate.
        rows: the cases; None is all.
        on_progress: called with the number of pairs done and their total.
    """
    rules = proved_rules.node_rules() if rules is None else rules
    rows = cases() if rows is None else rows
    pairs: list[tuple[NodeRule, Scheme]] = [(rule, rule.scheme) for rule in rules]
    pairs += _foreign(rules) if all_pairs else []
    reports: list[RuleReport] = []
    for done, (rule, scheme) in enumerate(pairs, start=1):
        reports.append(_checked_pair(rule, scheme, k, rows))
        if on_progress is not None:
            on_progress(done, len(pairs))
    return reports


def _foreign(rules: Sequence[NodeRule]) -> list[tuple[NodeRule, Scheme]]:
    """Pair one rule of each name with the schemes that no rule of that name is made for and whose rows it can read."""
    made_for: dict[str, list[Scheme]] = {}
    for rule in rules:
        made_for.setdefault(label(rule), []).append(rule.scheme)
    first = {label(rule): rule for rule in reversed(rules) if not rule.scheme.several_rows}
    readable = [scheme for scheme in proved_rules.schemes() if not scheme.several_rows]
    return [(rule, scheme) for rule in first.values() for scheme in readable if scheme not in made_for[label(rule)]]


def _checked_pair(rule: NodeRule, scheme: Scheme, k: int, rows: Sequence[Case]) -> RuleReport:
    if scheme == rule.scheme:
        return check_rule(rule, k, rows=rows)
    try:
        return check_rule(rule, k, scheme=scheme, rows=rows)
    except (UnpairedScheme, InvalidParameter) as refusal:
        return RuleReport(label(rule), scheme.name, paired=False, lossless=rule.lossless, refusal=str(refusal))


def _measured(rule: NodeRule, scheme: Scheme, k: int, rows: Sequence[Case]) -> _Measured:
    target = torch.stack([case.target_atoms for case in rows])
    drafted = torch.nn.functional.pad(torch.stack([case.draft_rows(scheme) for case in rows]), (0, 1))
    every = _enumerated(scheme, k, drafted, target)
    law = rule.law(every.drafts, every.draft_probs, every.target_probs)
    off = (every.averaged(law.emitted(every.drafts), len(rows)) - target).abs().amax(dim=-1)
    defect = off.scatter_reduce(0, every.of_case, _defect(law, every.drafts), "amax")
    acceptance = every.averaged(law.child.sum(dim=-1), len(rows))
    stated = acceptance
    if scheme == rule.scheme and isinstance(rule, NodeVerifier):
        stated = rule.acceptance(drafted, target, torch.full((len(rows),), k))
    return _Measured(defect.nan_to_num(inf, inf), acceptance, _optimum(every, target), (stated - acceptance).abs())


def _enumerated(scheme: Scheme, k: int, drafted: Float[Tensor, "c *J A"], target: Float[Tensor, "c A"]) -> _Enumeration:
    """List every ordered outcome of k drafts, with absent ones at the end, that has positive probability."""
    tokens = range(drafted.shape[-1] - 1)
    outcomes = [row + (-1,) * (k - there) for there in range(k, -1, -1) for row in product(tokens, repeat=there)]
    drafts = torch.tensor(outcomes).expand(len(target), -1, k)
    each = drafted.unsqueeze(1).expand(len(target), len(outcomes), *drafted.shape[1:])
    probability = scheme.probability(each[..., :-1], drafts)
    case, outcome = (probability > 0).nonzero(as_tuple=True)
    return _Enumeration(case, drafts[case, outcome], probability[case, outcome], drafted[case], target[case])


def _defect(law: OutcomeLaw, drafts: Int[Tensor, "m k"]) -> Float[Tensor, " m"]:
    """Return how far each outcome law is from being one: sum one, nothing negative, absent drafts not accepted."""
    whole = torch.cat([law.child, law.rest], dim=-1)
    negative = (-whole).clamp_min(0).amax(dim=-1)
    absent = (law.child.abs() * (drafts < 0)).amax(dim=-1)
    return torch.stack([(whole.sum(dim=-1) - 1).abs(), negative, absent]).amax(dim=0)


def _optimum(every: _Enumeration, target: Float[Tensor, "c A"]) -> Float[Tensor, " c"]:
    """Return 1 + min_H [target(H) - Pr[all drafts in H]] by going through all sets H (any scheme; few atoms)."""
    atoms = target.shape[-1]
    members_of: Bool[Tensor, "h A"] = torch.tensor(list(product([False, True], repeat=atoms)))
    there = every.drafts >= 0
    inside = members_of[:, every.drafts.clamp_min(0)] | ~there  # h m k
    contained = every.averaged(inside.all(dim=-1).T.to(target.dtype), len(target))
    return 1 + (target @ members_of.T.to(target.dtype) - contained).amin(dim=-1)


def _report(rule: NodeRule, scheme: Scheme, rows: Sequence[Case], found: Sequence[_Measured]) -> RuleReport:
    deviations = [
        Deviation(str(case), k, float(size))
        for k, one in enumerate(found, start=1)
        for case, size in zip(rows, one.deviation, strict=True)
    ]
    worst = tuple(sorted(deviations, key=lambda one: -one.size)[:3])
    shown = torch.tensor([case.name.startswith(RANDOM) for case in rows])
    shown = shown if bool(shown.any()) else torch.ones_like(shown)
    gaps = torch.stack([one.optimum - one.acceptance for one in found])
    return RuleReport(
        rule=label(rule),
        scheme=scheme.name,
        paired=scheme == rule.scheme,
        lossless=rule.lossless,
        drafts=len(found),
        deviation=worst[0].size,
        worst=worst,
        acceptance=tuple(float(one.acceptance[shown].mean()) for one in found),
        optimum=tuple(float(one.optimum[shown].mean()) for one in found),
        gap=max(0.0, float(gaps.max())),
        excess=max(0.0, float(-gaps.min())),
        misstated=max(float(one.misstated.max()) for one in found),
    )


def without_infinite(values: dict[str, object]) -> dict[str, object]:
    """Return values of a report for JSON: None in place of numbers that are not finite."""
    return {key: None if isinstance(one, float) and not isfinite(one) else one for key, one in values.items()}

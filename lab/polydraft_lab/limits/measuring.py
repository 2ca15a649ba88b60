"""The gap to the optimum on real text: what every rule accepts, and what any rule could, at every position."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.bench.prompts import Prompt, in_turn
from polydraft.bench.prompts.prompt import encode, seed_of
from polydraft.catalogue import parse_policy
from polydraft.drafters import Drafter, proposes
from polydraft.errors import ContextOverflow, InvalidParameter
from polydraft.probs import SamplingParams
from polydraft.theory import optimal_acceptance
from polydraft.trees import TreePolicy
from polydraft.verifiers import NaiveMatch, TopDown
from polydraft_lab.limits.branching import Accepted, accepted_on_trees, every, most_room
from polydraft_lab.limits.cases import (
    NAIVE,
    TREE_SHAPES,
    NodeCase,
    TreeCase,
    bounds_on,
    node_cases,
    tree_cases,
)
from polydraft_lab.limits.drafters import drafts_along, schemes_under
from polydraft_lab.limits.positions import Models, generate_sample, rows_on_atoms

UNFILTERED = {"top_k": 0, "top_p": 1.0, "typical_p": 1.0, "min_p": 0.0}
"""What a model's own generation settings may not change: rules are measured on the law at a temperature alone."""
OPTIMUM = "optimum"
"""The name under which a scheme's optimal acceptance stands beside its rules'."""

Acceptance = dict[str, dict[str, dict[str, float]]]
"""Summed over positions: scheme -> number of drafts, as a string -> rule -> probability of accepting a draft."""


@dataclass(frozen=True)
class LimitsSettings:
    """What is measured.

    Args:
        temperatures: of the target.
        drafts: numbers of drafts per node.
        max_tokens: how many tokens are generated per prompt and temperature, at most.
        excerpt_tokens: how many tokens of a plain text's passage are the prompt.
        draft_temperature: of the draft model; None for the target's.
        shortlist: how many of the draft model's likeliest tokens drafts are drawn from.
        tree_every: trees are grown at every so many positions; 0 for none.
        shapes: the trees, as `parse_policy` reads them.
        seed: fixes the texts and the trees.
        node_cases: the node rules.
        tree_cases: the tree rules.
        bounded: whether a bound on any exact rule stands beside them.

    Raises:
        InvalidParameter: a value outside its range.
    """

    temperatures: tuple[float, ...] = (0.0, 0.3, 0.6, 0.9, 1.2)
    drafts: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    max_tokens: int = 64
    excerpt_tokens: int = 64
    draft_temperature: float | None = None
    shortlist: int = 64
    tree_every: int = 4
    shapes: tuple[str, ...] = TREE_SHAPES
    seed: int = 0
    node_cases: tuple[NodeCase, ...] = field(default_factory=node_cases)
    tree_cases: tuple[TreeCase, ...] = field(default_factory=tree_cases)
    bounded: bool = True

    def __post_init__(self) -> None:
        for temperature in (*self.temperatures, self.draft_temperature or 0.0):
            SamplingParams(temperature=temperature)
        least = {"max_tokens": 1, "excerpt_tokens": 1, "shortlist": 2, "tree_every": 0, "seed": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise InvalidParameter(f"{name} must be an integer >= {bound}, but is {getattr(self, name)}.")
        for k in self.drafts:
            if not 1 <= k <= self.shortlist:
                raise InvalidParameter(f"Numbers of drafts must lie between 1 and shortlist, {self.shortlist}: {k}.")
        for name in ("temperatures", "drafts"):
            values = getattr(self, name)
            if not values or len({*values}) < len(values):
                raise InvalidParameter(f"{name} must be different values, at least one, but are {values}.")
        _ = self.policies

    @property
    def policies(self) -> dict[str, TreePolicy]:
        """The trees by their names."""
        return {name: parse_policy(name) for name in self.shapes}

    def draft_temperature_at(self, temperature: float) -> float:
        """Return the draft's temperature where the target's is given."""
        return temperature if self.draft_temperature is None else self.draft_temperature

    def suited(self, drafter: Drafter) -> "LimitsSettings":
        """Return the settings with the rules for the schemes that a drafter can draft under.

        Where a scheme has none, as tokens from outside, it is naive match, which is exact for all.

        Raises:
            InvalidParameter: there are none.
        """
        able = schemes_under(drafter) if proposes(drafter) else ()
        if not able:
            raise InvalidParameter(f"The drafter {drafter.name} drafts by no scheme with one row at a node.")
        nodes = tuple(one for one in self.node_cases if one.scheme in able)
        trees = tuple(one for one in self.tree_cases if one.verifier.scheme in able)
        for scheme in (one for one in able if one not in {case.scheme for case in nodes}):
            nodes += (NodeCase(NAIVE, NaiveMatch(scheme)),)
        for scheme in (one for one in able if one not in {case.verifier.scheme for case in trees}):
            trees += tuple(TreeCase(NAIVE, TopDown(NaiveMatch(scheme)), chain=chain) for chain in (True, False))
        return replace(self, node_cases=nodes, tree_cases=trees, bounded=False)

    def layout(self) -> dict[str, dict[str, set[str]]]:
        """Return what a record's sums at nodes are of: scheme -> number of drafts -> the optimum and the rules."""
        found: dict[str, dict[str, set[str]]] = {}
        for case in self.node_cases:
            of_scheme = found.setdefault(case.scheme.name, {})
            for k in (one for one in self.drafts if not case.gap_at(one, self.shortlist)):
                of_scheme.setdefault(str(k), {OPTIMUM}).add(case.label)
        return found

    def tree_layout(self) -> dict[str, dict[str, set[str]]]:
        """Return what a record's sums on trees are of: shape -> scheme -> the rules."""
        found: dict[str, dict[str, set[str]]] = {}
        for name, policy in self.policies.items():
            for case in (one for one in self.tree_cases if one.fits(policy)):
                of_scheme = found.setdefault(name, {}).setdefault(case.verifier.scheme.name, set())
                of_scheme.update({case.label, *(bounds_on(policy, case.verifier.scheme) if self.bounded else ())})
        return found

    def conditions(self) -> dict[str, object]:
        """Return what records must agree in to belong together; the temperature is in each record."""
        return {
            "drafts": list(self.drafts),
            "max_tokens": self.max_tokens,
            "excerpt_tokens": self.excerpt_tokens,
            "draft_temperature": self.draft_temperature,
            "shortlist": self.shortlist,
            "tree_every": self.tree_every,
            "shapes": list(self.shapes),
            "seed": self.seed,
            "rules": [f"{case.scheme.name}: {case.label}" for case in self.node_cases],
            "tree_rules": [f"{case.verifier.scheme.name}: {case.label}" for case in self.tree_cases],
        }


@dataclass(frozen=True)
class Record:
    """What was measured on one text.

    Args:
        task: the prompt's task.
        prompt: its name.
        temperature: the target's.
        positions: at how many positions the node rules were evaluated.
        nodes: what they accept, summed over positions.
        tree_positions: at how many positions trees were grown.
        trees: shape -> what the tree rules accept, summed over positions.
    """

    task: str
    prompt: str
    temperature: float
    positions: int
    nodes: Acceptance
    tree_positions: int
    trees: dict[str, Accepted]

    @property
    def key(self) -> tuple[str, str, float]:
        """What tells it from other records of a run."""
        return self.task, self.prompt, self.temperature


def fitting(models: Models, prompts: Sequence[Prompt], settings: LimitsSettings) -> list[Prompt]:
    """Return the prompts that leave room for a token in both models' contexts, tasks taking turns.

    Raises:
        ContextOverflow: none does.
    """
    room = models.room
    good = [one for one in prompts if 0 < encode(models.pair, one, settings.excerpt_tokens).shape[1] < room]
    if not good:
        raise ContextOverflow(f"None of the {len(prompts)} prompts fits into a context of {room} tokens.")
    return in_turn(good)


def keys_of(prompts: Sequence[Prompt], settings: LimitsSettings) -> list[tuple[str, str, float]]:
    """Return the keys of all records of a run, in the order in which they are measured."""
    return [(one.task, one.name, temperature) for one in prompts for temperature in settings.temperatures]


def measure(
    models: Models, prompts: Sequence[Prompt], settings: LimitsSettings, done: Collection[tuple[str, str, float]] = ()
) -> Iterator[Record]:
    """Measure every prompt at every temperature, but for those that are done; records come as they are finished."""
    for prompt in prompts:
        for temperature in settings.temperatures:
            if (prompt.task, prompt.name, temperature) not in done:
                yield measure_one(models, prompt, settings, temperature)


@torch.no_grad()
def measure_one(models: Models, prompt: Prompt, settings: LimitsSettings, temperature: float) -> Record:
    """Generate one text and evaluate all rules along it."""
    if models.drafter is not None:
        return _measure_drafter(models, models.drafter, prompt, settings, temperature)
    policies = settings.policies
    seed, draft_temperature = seed_of(prompt, settings.seed), settings.draft_temperature_at(temperature)
    room = most_room(list(policies.values()), settings.max_tokens, settings.tree_every)
    ids = encode(models.pair, prompt, settings.excerpt_tokens)
    sample = generate_sample(models, ids, temperature, settings.max_tokens, seed, room)
    draft_probs, target_probs = rows_on_atoms(sample, temperature, draft_temperature, settings.shortlist)
    roots = every(sample, settings.tree_every) if settings.tree_every else sample.tokens[:0]
    trees = {
        name: accepted_on_trees(
            sample, roots, policy, settings.tree_cases, (temperature, draft_temperature), settings.shortlist, seed
        )
        for name, policy in policies.items()
        if len(roots)
    }
    nodes = acceptance_at_nodes(draft_probs, target_probs, settings.drafts, settings.node_cases, settings.shortlist)
    return Record(prompt.task, prompt.name, temperature, sample.positions, nodes, len(roots), trees)


def _measure_drafter(
    models: Models, drafter: Drafter, prompt: Prompt, settings: LimitsSettings, temperature: float
) -> Record:
    """Generate one text and evaluate all rules on what a drafter drafts along it."""
    ids, policies = encode(models.pair, prompt, settings.excerpt_tokens), settings.policies
    sampling = dict[str, Any](temperature=temperature, seed=seed_of(prompt, settings.seed))
    sampling |= {**UNFILTERED, "repetition_penalty": 1.0} if temperature else {"repetition_penalty": 1.0}
    tokens = max(1, min(settings.max_tokens, models.room - ids.shape[1] - 1))
    bounds = tokens, settings.tree_every, max(settings.drafts), settings.shortlist
    seen = drafts_along(models.pair.target, drafter, ids, policies, settings.tree_cases, sampling, bounds)
    nodes: Acceptance = {}
    empty = (torch.zeros(0, settings.shortlist + 1, dtype=torch.float64),) * 2
    for scheme, rows in seen.rows.items():
        cases = [one for one in settings.node_cases if one.scheme.name == scheme]
        nodes |= acceptance_at_nodes(*(rows or empty), settings.drafts, cases, settings.shortlist)
    looked = -(-seen.positions // settings.tree_every) if settings.tree_every else 0
    return Record(prompt.task, prompt.name, temperature, seen.positions, nodes, looked, seen.trees)


def acceptance_at_nodes(
    draft_probs: Float[Tensor, "m A"],
    target_probs: Float[Tensor, "m A"],
    drafts: Sequence[int],
    cases: Sequence[NodeCase],
    shortlist: int | None = None,
) -> Acceptance:
    """Sum up over positions what each rule accepts, and what its scheme allows; computed, not sampled.

    Positions with the same rows, of which temperature 0 has many, are computed once. `shortlist` is the largest number
    of tokens with a draft probability; None for all.
    """
    room = draft_probs.shape[-1] if shortlist is None else shortlist
    both, times = torch.cat([draft_probs, target_probs], dim=-1).unique(dim=0, return_counts=True)
    draft, target = both.chunk(2, dim=-1)
    result: Acceptance = {}
    for case in cases:
        of_scheme = result.setdefault(case.scheme.name, {})
        for k in (one for one in drafts if not case.gap_at(one, room)):
            rules = of_scheme.setdefault(str(k), {})
            if OPTIMUM not in rules:
                rules[OPTIMUM] = float((optimal_acceptance(draft, target, case.scheme, k) * times).sum())
            counts: Int[Tensor, " m"] = torch.full_like(times, k)
            rules[case.label] = float((case.acceptance(draft, target, counts) * times).sum())
    return result
